# SPDX-License-Identifier: Apache-2.0
"""Output distributions against stock SGLang's, within its own noise (design.md, 'How right is judged').

VATTN_GPU_ARMS=auto,poison runs those arms alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu import jobs

BASE = "stock_page1"
NOISE = ("stock_page128", "stock_triton")
STOCK: dict[str, dict[str, Any]] = {
    BASE: {"page_size": 1},
    "stock_page128": {"page_size": 128},
    "stock_triton": {"page_size": 1, "attention_backend": "triton"},
}
SHARE_ALWAYS = {"VATTN_SHARED_DECODE_BYTES": "1"}
POISON = {"VATTN_TEST_POISON": "1"}
OURS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "auto": ({}, {}),
    "pages": ({"vattn_read": "pages", "vattn_shared_decode": "off"}, {}),
    "rows": ({"vattn_read": "rows", "vattn_shared_decode": "off"}, {}),
    "shared": ({"vattn_read": "rows"}, SHARE_ALWAYS),
    "poison": ({"vattn_read": "rows", "nan": True}, SHARE_ALWAYS | POISON),
    "triton": ({"attention_backend": "triton"}, {}),
    "flashinfer": ({"attention_backend": "flashinfer"}, {}),
}
CHOSEN = os.environ.get("VATTN_GPU_ARMS", ",".join(OURS)).split(",")
AT_ONCE = 4  # engines a GPU


def run_arms(
    scratch: Path, spec: str, arms: dict[str, tuple[dict[str, Any], dict[str, str]]], gpus_each: int = 1
) -> dict[str, Any]:
    """Start the arms, spread over the GPUs, a few at once on each, and load what they wrote."""
    (scratch / "jobs.json").write_text(spec)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    each = gpus.split(",")
    devices = [",".join(each[first : first + gpus_each]) for first in range(0, len(each), gpus_each)]
    names, results = list(arms), {}
    for first in range(0, len(names), AT_ONCE * len(devices)):
        running = {}
        for i, name in enumerate(names[first : first + AT_ONCE * len(devices)]):
            arguments, env = arms[name]
            log = (scratch / f"{name}.log").open("w")
            command = [sys.executable, "-m", "tests.gpu.arm", str(scratch / "jobs.json"), str(scratch / f"{name}.npz")]
            running[name] = subprocess.Popen(
                [*command, json.dumps(arguments)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": devices[i % len(devices)], **env},
            )
        for name, process in running.items():
            code = process.wait(timeout=500)
            if code:
                print(f"{name}: exit {code}\n" + (scratch / f"{name}.log").read_text()[-4000:])
            else:
                results[name] = np.load(scratch / f"{name}.npz")
    return results


def divergences(a: Any, b: Any, count: int) -> np.ndarray:
    """KL(a || b) of each output token's distribution, up to the first token that differs in each job."""
    found: list[float] = []
    for i in range(count):
        ta, tb = a[f"tokens_{i}"], b[f"tokens_{i}"]
        n = min(len(ta), len(tb))
        differ = np.flatnonzero(ta[:n] != tb[:n])
        upto = differ[0] + 1 if len(differ) else n
        pa, pb = a[f"logprobs_{i}"][:upto].astype(np.float64), b[f"logprobs_{i}"][:upto].astype(np.float64)
        found += (np.exp(pa) * (pa - pb)).sum(axis=1).tolist()
    return np.array(found)


def summary(kl: np.ndarray) -> dict[str, float]:
    return {"mean": float(kl.mean()), "p99": float(np.percentile(kl, 99)), "tokens": len(kl)}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    scratch = Path(os.environ.get("VATTN_GPU_SCRATCH") or tmp_path_factory.mktemp("quality"))
    jobs.write_model(scratch / "model")
    groups = jobs.prompt_groups() + jobs.long_prompt()
    arms = {name: (arguments, {}) for name, arguments in STOCK.items()}
    ours = {name: OURS[name] for name in CHOSEN}
    arms |= {name: ({"kv_backend": "vattn", **arguments}, env) for name, (arguments, env) in ours.items()}
    spec = jobs.spec(scratch / "model", jobs.filler() + groups, context_length=131072)
    return run_arms(scratch, spec, arms), sum(map(len, groups))


@pytest.mark.parametrize("arm", CHOSEN)
def test_outputs_stay_within_the_noise_of_stock(outputs: tuple[dict[str, Any], int], arm: str) -> None:
    results, count = outputs
    assert arm in results, "the engine failed; its log is above"
    base = results[BASE]
    noise = [summary(divergences(base, results[name], count)) for name in NOISE]
    same_kernel = results.get(f"stock_{arm}", base)  # Triton leaves FA3 too soon to compare much
    ours = summary(divergences(same_kernel, results[arm], count))
    print(f"\nKL against stock: noise {noise}, {arm} {ours}")
    assert ours["tokens"] > 1000
    for key in ("mean", "p99"):
        floor = max(each[key] for each in noise)
        assert ours[key] <= 1.5 * floor, (arm, key, ours[key], floor)


def test_each_arm_read_as_it_was_told(outputs: tuple[dict[str, Any], int]) -> None:
    results, _ = outputs
    counters = {arm: json.loads(str(results[arm]["vattn"])) for arm in CHOSEN if arm in results}
    keys = ("batches_rows", "batches_pages", "batches_shared", "batches_waited", "groups", "pages_saved")
    for arm, counts in counters.items():
        print(arm, {key: counts[key] for key in keys})
    for arm, counts in counters.items():
        if arm == "rows":
            assert counts["batches_rows"] > 20 * counts["batches_pages"]
        elif arm in ("shared", "poison"):
            assert counts["batches_shared"] > 100
        else:
            assert (counts["batches_rows"] > 0) == (arm == "auto"), arm
