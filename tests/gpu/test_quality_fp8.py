# SPDX-License-Identifier: Apache-2.0
"""fp8 KV: output distributions against stock SGLang with the same fp8 KV, and twice the tokens in the same memory.

As test_quality.py, over fewer prompts. With e4m3, FlashAttention 3 reads rows; with e5m2 SGLang serves by Triton, which
reads pages.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu import jobs
from tests.gpu.test_quality import POISON, SHARE_ALWAYS, divergences, run_arms, summary
from tests.support.engines import Run, log_of, run_all

E4M3 = {"kv_cache_dtype": "fp8_e4m3"}
E5M2 = {"kv_cache_dtype": "fp8_e5m2", "attention_backend": "triton"}
STOCK: dict[str, dict[str, Any]] = {
    "e4m3": E4M3 | {"page_size": 1},
    "e4m3_page128": E4M3 | {"page_size": 128},
    "e4m3_triton": E4M3 | {"page_size": 1, "attention_backend": "triton"},
    "e5m2": E5M2 | {"page_size": 1},
    "e5m2_no_hits": E5M2 | {"page_size": 1, "disable_radix_cache": True},
}
OURS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "auto": (E4M3, {}),
    "rows": (E4M3 | {"vattn_read": "rows", "vattn_shared_decode": "off"}, {}),
    "shared": (E4M3 | {"vattn_read": "rows"}, SHARE_ALWAYS),
    "poison": (E4M3 | {"vattn_read": "rows", "nan": True}, SHARE_ALWAYS | POISON),
    "e5m2_pages": (E5M2, {}),
}
NOISE = {"e4m3": ("e4m3_page128", "e4m3_triton"), "e5m2": ("e5m2_no_hits",)}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("VATTN_GPU_SCRATCH") or tmp_path_factory.mktemp("fp8"))
    if not (folder / "model").exists():
        jobs.write_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def outputs(scratch: Path) -> tuple[dict[str, Any], int]:
    groups = jobs.prompt_groups(count=80)
    arms = {name: (arguments, {}) for name, arguments in STOCK.items()}
    arms |= {name: ({"kv_backend": "vattn", **arguments}, env) for name, (arguments, env) in OURS.items()}
    spec = jobs.spec(scratch / "model", groups, context_length=8192, cuda_graph_backend_prefill="disabled")
    return run_arms(scratch, spec, arms), sum(map(len, groups))


@pytest.mark.parametrize("arm", OURS)
def test_outputs_stay_within_the_noise_of_stock_fp8(outputs: tuple[dict[str, Any], int], arm: str) -> None:
    results, count = outputs
    base = "e5m2" if "e5m2" in arm else "e4m3"
    for name in (base, *NOISE[base], arm):
        assert name in results, f"{name} failed; its log is above"
    noise = [summary(divergences(results[base], results[name], count)) for name in NOISE[base]]
    ours = summary(divergences(results[base], results[arm], count))
    print(f"\nKL against stock {base} page 1: noise {noise}, {arm} {ours}")
    assert ours["tokens"] > 500
    for key in ("mean", "p99"):
        floor = max(each[key] for each in noise)
        assert ours[key] <= 1.5 * floor, (arm, key, ours[key], floor)


def test_each_arm_read_as_it_was_told(outputs: tuple[dict[str, Any], int]) -> None:
    results, _ = outputs
    counters = {arm: json.loads(str(results[arm]["vattn"])) for arm in OURS}
    for arm, counts in counters.items():
        print(arm, {key: counts[key] for key in ("batches_rows", "batches_pages", "batches_shared")})
    assert counters["rows"]["batches_rows"] > 20 * counters["rows"]["batches_pages"]
    assert counters["shared"]["batches_shared"] > 50 and counters["poison"]["batches_shared"] > 50
    assert counters["e5m2_pages"]["batches_rows"] == 0


def test_twice_the_tokens_in_the_same_memory(scratch: Path) -> None:
    """The pool's size as SGLang works it out from --mem-fraction-static, one engine after the other."""
    engine = json.loads(jobs.spec(scratch / "model", []))["engine"] | {
        "kv_backend": "vattn",
        "context_length": 8192,
        "mem_fraction_static": 0.3,
        "disable_cuda_graph": True,
        "max_total_tokens": None,
    }
    dtypes = ("auto", "fp8_e4m3", "fp8_e5m2")
    runs: list[Run] = [{"engine": engine | {"kv_cache_dtype": dtype}, "requests": []} for dtype in dtypes]
    results = run_all(runs, scratch / "pools", os.environ)
    assert not any("error" in result for result in results), log_of(scratch / "pools")[-4000:]
    tokens = [result["vattn"]["num_pages"] * result["vattn"]["page_size"] for result in results]
    print(f"\ntokens in the pool: {dict(zip(dtypes, tokens, strict=True))}")
    assert np.allclose(np.array(tokens[1:]) / tokens[0], 2, rtol=0.02)
