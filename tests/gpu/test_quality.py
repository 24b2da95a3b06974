# SPDX-License-Identifier: Apache-2.0
"""Output distributions against stock SGLang's, within its own noise (design.md, 'How right is judged')."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu import jobs

ARMS: dict[str, dict[str, Any]] = {
    "stock_page1": {"page_size": 1},
    "stock_page128": {"page_size": 128},
    "stock_triton": {"page_size": 1, "attention_backend": "triton"},
    "vattn": {"kv_backend": "vattn"},
    "vattn_pages": {"kv_backend": "vattn", "vattn_read": "pages"},
    "vattn_rows": {"kv_backend": "vattn", "vattn_read": "rows"},
}


def run_arms(scratch: Path, spec: str, arms: dict[str, dict[str, Any]], at_once: int = 3) -> dict[str, Any]:
    """Start the arms on the one GPU, a few at once (each takes a fifth of its memory), and load what they wrote."""
    (scratch / "jobs.json").write_text(spec)
    names, results = list(arms), {}
    for first in range(0, len(names), at_once):
        running = {}
        for name in names[first : first + at_once]:
            log = (scratch / f"{name}.log").open("w")
            command = [sys.executable, "-m", "tests.gpu.arm", str(scratch / "jobs.json"), str(scratch / f"{name}.npz")]
            running[name] = subprocess.Popen([*command, json.dumps(arms[name])], stdout=log, stderr=subprocess.STDOUT)
        for name, process in running.items():
            code = process.wait(timeout=500)
            assert code == 0, f"{name}: exit {code}\n" + (scratch / f"{name}.log").read_text()[-4000:]
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
    scratch = tmp_path_factory.mktemp("quality")
    jobs.write_model(scratch / "model")
    groups = jobs.prompt_groups()
    return run_arms(scratch, jobs.spec(scratch / "model", groups), ARMS), sum(map(len, groups))


@pytest.mark.parametrize("arm", ["vattn", "vattn_pages", "vattn_rows"])
def test_outputs_stay_within_the_noise_of_stock(outputs: tuple[dict[str, Any], int], arm: str) -> None:
    results, count = outputs
    base = results["stock_page1"]
    noise = [summary(divergences(base, results[name], count)) for name in ("stock_page128", "stock_triton")]
    ours = summary(divergences(base, results[arm], count))
    print(f"\nKL against stock page 1: noise {noise}, {arm} {ours}")
    assert ours["tokens"] > 1000
    for key in ("mean", "p99"):
        floor = max(each[key] for each in noise)
        assert ours[key] <= 1.5 * floor, (arm, key, ours[key], floor)


def test_rows_were_read(outputs: tuple[dict[str, Any], int]) -> None:
    results, _ = outputs
    counters = {arm: json.loads(str(results[arm]["vattn"])) for arm in ("vattn", "vattn_pages", "vattn_rows")}
    print("\n", {arm: (c["batches_rows"], c["batches_pages"]) for arm, c in counters.items()})
    assert counters["vattn_rows"]["batches_rows"] > 20 * counters["vattn_rows"]["batches_pages"]
    assert counters["vattn_pages"]["batches_rows"] == 0
    assert counters["vattn"]["batches_rows"] > 0
