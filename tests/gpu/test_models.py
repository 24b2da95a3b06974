# SPDX-License-Identifier: Apache-2.0
"""Each family of models by its real heads, fp8 KV and every kernel that serves: on the GPU, against stock SGLang.

    python -m pytest -s --noconftest -o pythonpath= -o addopts= tests/gpu/test_models.py

Random weights, four layers (tests/support/tiny_model.py). As in test_quality.py: the distributions of output tokens
stay within the noise of stock, and every request hits as many tokens as with stock at page size 1.
VATTN_GPU_GROUPS=kernels,gemma2 runs those groups alone.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_vattn.attention.kernels import kernel_class, refusal
from tests.gpu.test_kernels import cudnn_refusal
from tests.gpu.test_quality import divergences, summary
from tests.support.engines import Request, Run, log_of, run_all
from tests.support.tiny_model import GEOMETRIES, LORA_NAMES, write_lora, write_model_of_geometry

VOCABULARY = 512
AT_ONCE = 12  # engines on the GPU
LIMIT_S = 540.0  # of an engine: stock's FlashInfer compiles its kernels at its first start
ENGINE = {
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "context_length": 32768,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 128 * 1024,
    "max_running_requests": 16,
    "cuda_graph_bs_decode": [1, 8, 16],
    "cuda_graph_backend_prefill": "disabled",
    "skip_server_warmup": True,
    "random_seed": 0,
    "log_level": "info",
}


class Group(NamedTuple):
    """Stock's engine, others of stock whose largest distance from it is the noise, and ours, each with what it adds.

    One of ours whose kernel stock's engines here do not have is compared with another of stock, under ``like``, which
    has; the noise is the same. Beside arguments an engine may add `env`.
    """

    family: str
    stock: dict[str, Any]
    noise: tuple[dict[str, Any], ...]
    ours: dict[str, dict[str, Any]]
    adapters: tuple[str | None, ...] = (None,)
    like: Mapping[str, dict[str, Any]] = MappingProxyType({})


FA3, ROWS = {"attention_backend": "fa3"}, {"rows": {"vattn_read": "rows"}}
E4M3, E5M2 = {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}
PAGE128, TRITON = {"page_size": 128}, {"attention_backend": "triton"}
# Left alone stock prefills by FlashInfer's kernel for packed keys, on this chip FA3's algorithm. This is stock by the
# paged one that ours calls, whose rounding is further from FA3's than Triton's is; as ours without graphs.
PAGED = {
    "attention_backend": "flashinfer",
    "disable_decode_cuda_graph": True,
    "env": {"SGLANG_FLASHINFER_USE_PAGED": "1"},
}
KERNELS = {
    # Beside Triton, so that what the kernel does not read is told apart.
    name: {"attention_backend": "triton", "vattn_read": "rows", "vattn_kernel": name}
    | ({} if kernel_class(name).capturable else {"disable_decode_cuda_graph": True})
    for name in ("fa3", "fa2", "fa4", "flashinfer", "sdpa", "torch")
}
GROUPS = {
    "kernels": Group("llama", FA3, (PAGE128, TRITON), KERNELS, like={"flashinfer": PAGED}),
    **{family: Group(family, FA3, (PAGE128, TRITON), ROWS) for family in GEOMETRIES},
    "lora": Group("llama", FA3 | {"lora_backend": "triton"}, (PAGE128, TRITON), ROWS, (None, *LORA_NAMES)),
    "fp8-e4m3": Group("llama", FA3 | E4M3, (PAGE128, TRITON), ROWS),
    "fp8-e4m3-256": Group("gemma", FA3 | E4M3, (PAGE128, TRITON), ROWS),
    "fp8-e5m2": Group("llama", E5M2 | TRITON, ({"disable_radix_cache": True},), {"pages": {}}),
}
SAME_END = list(range(2, 42))  # of the last two prompts, which begin differently
LEAST_KL = 0.1  # between them: else what the model says hardly depends on what it has in its cache
CHOSEN = os.environ.get("VATTN_GPU_GROUPS", ",".join(GROUPS)).split(",")


def requests(adapters: Sequence[str | None]) -> list[Request]:
    """Prefixes of two documents, whose cuts lie around borders of pages and in mid-page."""
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(count)]

    found = []
    for document in (tokens(1200), tokens(900)):
        for cut in (len(document), 127, 128, 129, 300, 511, 512, 513, 700, 850):
            found += [(document[:cut] + tokens(rng.randrange(1, 60)), 16) for _ in range(2)]
    found += [(tokens(70) + SAME_END, 16) for _ in range(2)]
    return [Request(ids, new, None, adapter) for ids, new in found for adapter in adapters]


def refused(name: str) -> str | None:
    if name == "torch":
        return cudnn_refusal()
    return refusal(name, device="cuda") if name in KERNELS else None


def runs_of(group: Group, scratch: Path) -> dict[str, tuple[Run, dict[str, str]]]:
    """By name each engine's run, and what it adds to the environment."""
    common = {**ENGINE, **group.stock, "model_path": str(scratch / group.family)}
    if len(group.adapters) > 1:
        common["lora_paths"] = {adapter: str(scratch / adapter) for adapter in LORA_NAMES}
        common["max_loras_per_batch"] = len(group.adapters)
    engines = {"stock": common | {"page_size": 1}}
    engines |= {f"noise{i}": common | {"page_size": 1} | other for i, other in enumerate(group.noise)}
    engines |= {f"like-{name}": common | {"page_size": 1} | other for name, other in group.like.items()}
    engines |= {name: common | {"kv_backend": "vattn"} | own for name, own in group.ours.items() if not refused(name)}
    wanted, runs = requests(group.adapters), dict[str, tuple[Run, dict[str, str]]]()
    for name, arguments in engines.items():
        env = arguments.pop("env", {})
        runs[name] = {"engine": arguments, "requests": wanted}, env
    return runs


Answered = dict[tuple[str, str], "Future[dict[str, Any]]"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Answered, Path]]:
    """What each engine of each group answers, and the folder with the distributions; several engines at once.

    In the order of the groups, so that a run that is cut off has judged the first of them.
    """
    scratch = Path(os.environ.get("VATTN_GPU_SCRATCH") or tmp_path_factory.mktemp("models"))
    families = {GROUPS[name].family for name in CHOSEN}
    for family in families:
        write_model_of_geometry(scratch / family, family)
    if "lora" in CHOSEN:
        for seed, adapter in enumerate(LORA_NAMES):
            write_lora(scratch / adapter, scratch / "llama", seed)

    wanted = {(group, name): run for group in CHOSEN for name, run in runs_of(GROUPS[group], scratch).items()}

    def run(which: tuple[str, str]) -> dict[str, Any]:
        label, began = "-".join(which), time.monotonic()
        asked, env = wanted[which]
        one: Run = {**asked, "distributions": (str(scratch / f"{label}.npz"), VOCABULARY), "limit_s": LIMIT_S}
        [result] = run_all([one], scratch / f"log-{label}", os.environ | env)
        if "error" in result:
            print(f"{label}:\n{log_of(scratch / f'log-{label}')[-6000:]}")
        print(f"{label}: {time.monotonic() - began:.0f} s")
        return result

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {which: pool.submit(run, which) for which in wanted}, scratch
        pool.shutdown(wait=False, cancel_futures=True)  # of a session that ends early; otherwise all have answered


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in CHOSEN for name in GROUPS[group].ours])
def test_within_the_noise_of_stock(engines: tuple[Answered, Path], group: str, name: str) -> None:
    answered, scratch = engines
    if reason := refused(name):
        print(f"\nrefused: {reason}")
        assert "pip install" in reason or name == "torch"
        return
    adapters = len(GROUPS[group].adapters)
    others = [f"noise{i}" for i in range(len(GROUPS[group].noise))]
    reference = f"like-{name}" if name in GROUPS[group].like else "stock"
    found = {engine: answered[group, engine].result() for engine in dict.fromkeys(("stock", *others, reference, name))}
    for engine, result in found.items():
        assert "error" not in result, f"{engine}: {result}; its log is above"
    answers = {engine: np.load(scratch / f"{group}-{engine}.npz") for engine in found}
    count = len(requests(GROUPS[group].adapters))
    last, before = answers["stock"][f"logprobs_{count - 1}"][0], answers["stock"][f"logprobs_{count - 1 - adapters}"][0]
    assert (np.exp(last) * (last - before)).sum() > LEAST_KL, "a model that ignores its context shows nothing"
    noise = [summary(divergences(answers["stock"], answers[other], count)) for other in others]
    off = summary(divergences(answers[reference], answers[name], count))
    counters = found[name]["vattn"]
    rows, pages = counters["batches_rows"], counters["batches_pages"]
    print(f"\n{group} {name}: KL noise {noise}, ours to {reference} {off}, batches by rows {rows}, by pages {pages}")
    far = {other: summary(divergences(answers[other], answers[name], count)) for other in answers if other != name}
    print("ours to each:", far)
    assert off["tokens"] > 200
    for key in ("mean", "p99"):
        floor = max(each[key] for each in noise)
        assert off[key] <= 1.5 * floor, (key, off[key], floor)
    assert found["stock"]["cached"] == found[name]["cached"]
    assert found[name]["after_flush"]["free"] == counters["num_pages"]
    assert counters["tokens_copied"] > 0
    assert rows > 10 * pages if name != "pages" else rows == 0
