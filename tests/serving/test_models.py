# SPDX-License-Identifier: Apache-2.0
"""Each family of models, LoRA adapters and fp8 KV: greedy output and hits equal stock SGLang's, hits in mid-page too.

Tiny random models in float32 (tests/support/tiny_model.py), a few seconds each (tests/support/engines.py). By real
geometry, on a GPU: tests/gpu/test_models.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kernels import document
from tests.support.engines import Request, Run, log_of, run_all
from tests.support.server import NO_PLUGINS, STRICT, TROUBLE, environment, python_path
from tests.support.tiny_model import LORA_NAMES, tiny_model, write_lora
from tests.support.workload import Workload, corner_lengths

pytestmark = pytest.mark.timeout(1500)  # the first test waits for 28 engines: 3 minutes, 7 on a busy machine
PAGE = 16
ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "context_length": 4096,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "log_level": "info",
    "max_total_tokens": 32768,  # nothing is evicted
}
STOCK = {"page_size": 1}
OURS = {"kv_backend": "vattn", "page_size": PAGE, "vattn_read": "rows"}


class Arm(NamedTuple):
    """A model to serve, with arguments that both engines get."""

    family: str
    token_bytes: int  # of K and V, as a page must hold them
    arguments: dict[str, Any] = {}  # noqa: RUF012
    adapters: tuple[str | None, ...] = (None,)
    ours: dict[str, Any] = {}  # noqa: RUF012  # and what ours gets besides
    setup: str = ""  # called in our engine's process


ARMS = {
    "llama": Arm("llama", 2048),
    "qwen2": Arm("qwen2", 2048),
    "qwen3": Arm("qwen3", 4096),
    "mistral": Arm("mistral", 2048),
    "gemma": Arm("gemma", 8192),
    "gemma2": Arm("gemma2", 4096),
    "mixtral": Arm("mixtral", 2048),
    "qwen3-moe": Arm("qwen3_moe", 4096),
    "fp8-e4m3": Arm("llama", 512, {"kv_cache_dtype": "fp8_e4m3"}),
    "fp8-e5m2": Arm("llama", 512, {"kv_cache_dtype": "fp8_e5m2"}),
    "added-kernel": Arm("llama", 2048, ours={"vattn_kernel": document.NAME}),
    # The backend that takes any kernel on CUDA, over torch_native here: its layers with windows read pages.
    "any-kernel": Arm("qwen3", 4096, setup="tests.support.any_kernel_on_host:install"),
    "any-kernel-gemma2": Arm("gemma2", 4096, setup="tests.support.any_kernel_on_host:install"),
    "lora": Arm("llama", 2048, {"lora_backend": "torch_native"}, (None, *LORA_NAMES)),
}


def requests(adapters: Sequence[str | None]) -> list[Request]:
    """Prefixes of one document around the borders of pages, and a conversation; each once for every adapter in turn."""
    work = Workload(seed=11)
    document = work.tokens(5 * PAGE)
    work.add(document, 20)
    for shared in [*corner_lengths(PAGE), 70, 79]:
        work.sharing(document, shared, tail=1 + work.random.randrange(PAGE + 3), new_tokens=5)
    turn = work.add(document[:37], 20)
    for _ in range(2):
        turn = work.add(work.tokens(7), 20, follows=turn)
    end = work.tokens(30)
    for _ in range(2):  # the last two end alike
        work.add(work.tokens(40) + end, 8)
    return [
        Request(step.ids, step.new_tokens, None if step.follows is None else step.follows * len(adapters) + i, adapter)
        for step in work.steps
        for i, adapter in enumerate(adapters)
    ]


def runs(root: Path, scratch: Path, ours: bool) -> list[Run]:
    found: list[Run] = []
    for arm in ARMS.values():
        model = tiny_model(root / "build" / "models", arm.family)
        own = OURS | arm.ours if ours else STOCK
        engine = {**ENGINE, **own, **arm.arguments, "model_path": str(model)}
        if len(arm.adapters) > 1:
            engine["lora_paths"] = {name: str(scratch / name) for name in LORA_NAMES}
        run: Run = {"engine": engine, "requests": requests(arm.adapters)}
        if ours and arm.setup:
            run["setup"] = arm.setup
        found.append(run)
    return found


@pytest.fixture(scope="module")
def results(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Stock's and ours for each arm; both engines' processes run side by side."""
    scratch = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(LORA_NAMES):
        write_lora(scratch / name, tiny_model(root / "build" / "models", "llama"), seed)
    document.write_shown_kernel(root, scratch)
    with ThreadPoolExecutor(2) as pool:
        stock = pool.submit(run_all, runs(root, scratch, False), scratch / "stock", environment(NO_PLUGINS))
        path = {"PYTHONPATH": python_path(scratch)}
        ours = pool.submit(run_all, runs(root, scratch, True), scratch / "ours", environment(STRICT | path))
        both = dict(zip(ARMS, zip(stock.result(), ours.result(), strict=True), strict=True))
    assert not TROUBLE.findall(log_of(scratch / "ours"))
    return both


def differences(right: list[Any], got: list[Any]) -> str:
    wrong = [i for i, (a, b) in enumerate(zip(right, got, strict=True)) if a != b]
    return "; ".join(f"request {i}: {right[i]} by stock, {got[i]}" for i in wrong[:4])


@pytest.mark.parametrize("arm", ARMS)
def test_same_output_and_hits(results: dict[str, tuple[dict[str, Any], dict[str, Any]]], arm: str) -> None:
    stock, ours = results[arm]
    assert "error" not in stock and "error" not in ours, (stock, ours)
    last, other = stock["outputs"][-1], stock["outputs"][-1 - len(ARMS[arm].adapters)]
    assert last != other, "a model that hears only the end of its prompt shows nothing"
    for what in ("outputs", "cached", "together"):
        assert stock[what] == ours[what], f"{what}: {differences(stock[what], ours[what])}"


@pytest.mark.parametrize("arm", ARMS)
def test_it_was_ours_that_served(results: dict[str, tuple[dict[str, Any], dict[str, Any]]], arm: str) -> None:
    stock, ours = results[arm]
    counters = ours["vattn"]
    assert stock["vattn"] == {}
    assert counters["page_bytes"] == PAGE * ARMS[arm].token_bytes
    assert counters["tokens_copied"] > 0, "no hit ended in mid-page"
    assert counters["batches_rows"] > 10 * counters["batches_pages"]
    assert ours["after_flush"]["free"] == ours["after_flush"]["num_pages"]


def test_adapters_change_the_output(results: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """And a prompt that one adapter has cached is no hit for another: the first of each three is not cached at all."""
    stock, ours = results["lora"]
    count = 1 + len(LORA_NAMES)
    assert len({tuple(output) for output in stock["outputs"][:count]}) == count
    assert ours["cached"][:count] == [0] * count
