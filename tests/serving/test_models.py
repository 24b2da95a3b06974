# SPDX-License-Identifier: Apache-2.0
"""Each family of models, and fp8 KV: greedy output and hits equal stock SGLang's, with prefixes that end in mid-page.

Tiny random models in float32 (tests/support/tiny_model.py). What the CPU cannot show, a GPU does: tests/gpu.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.checks import assert_same_hits, assert_same_outputs, unharmed
from tests.support.client import Answer, Client
from tests.support.golden import Case
from tests.support.server import NO_PLUGINS, STRICT, Server
from tests.support.tiny_model import LORA_NAMES, tiny_model, write_lora
from tests.support.workload import Workload, corner_lengths

PAGE = 16
POOL = 16384  # tokens: nothing is evicted


class Arm(NamedTuple):
    """A model to serve, with flags that both servers get."""

    family: str
    token_bytes: int  # of K and V, as a page must hold them
    flags: tuple[str, ...] = ()


ARMS = {
    "qwen2": Arm("qwen2", 2048),
    "qwen3": Arm("qwen3", 4096),
    "mistral": Arm("mistral", 2048),
    "gemma": Arm("gemma", 8192),
    "gemma2": Arm("gemma2", 4096),
    "mixtral": Arm("mixtral", 2048),
    "qwen3-moe": Arm("qwen3_moe", 4096),
    "llama-fp8-e4m3": Arm("llama", 512, ("--kv-cache-dtype=fp8_e4m3",)),
    "llama-fp8-e5m2": Arm("llama", 512, ("--kv-cache-dtype=fp8_e5m2",)),
}


def work() -> Workload:
    """Prefixes of one document around the borders of pages, conversations, and one batch's worth of long answers."""
    work = Workload(seed=11)
    document = work.tokens(5 * PAGE)
    work.add(document, 20)
    for shared in [*corner_lengths(PAGE), 70, 79]:
        work.sharing(document, shared, tail=1 + work.random.randrange(PAGE + 3), new_tokens=5)
    turn = work.add(document[:37], 20)
    for _ in range(2):
        turn = work.add(work.tokens(7), 20, follows=turn)
    return work


def answers(client: Client, adapters: tuple[str | None, ...] = (None,)) -> list[Case]:
    """The workload's requests one after the other, each once for every adapter."""
    cases: list[Case] = []
    for step in work().steps:
        for i, adapter in enumerate(adapters):
            before: tuple[int, ...] = ()
            if step.follows is not None:
                earlier = cases[step.follows * len(adapters) + i]
                before = earlier.prompt + earlier.output
            prompt = before + step.ids
            answer = ask(client, prompt, step.new_tokens, adapter)
            cases.append(Case(prompt, step.new_tokens, answer.output, answer.cached_tokens))
    return cases


def ask(client: Client, prompt: tuple[int, ...], new_tokens: int, adapter: str | None) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "lora_path": adapter}
    return Answer.parse(json.loads(client.text("/generate", body)))


@contextmanager
def stock(model: Path, folder: Path, flags: tuple[str, ...]) -> Iterator[Server]:
    common = ["--page-size=1", f"--max-total-tokens={POOL}", *flags]
    with Server(model, folder / "stock", common, env=NO_PLUGINS | STRICT) as server:
        yield server


@contextmanager
def ours(model: Path, folder: Path, flags: tuple[str, ...]) -> Iterator[Server]:
    common = ["--kv-backend=vattn", f"--page-size={PAGE}", f"--max-total-tokens={POOL}", "--vattn-read=rows", *flags]
    with Server(model, folder / "ours", common, env=STRICT) as server, unharmed(server):
        yield server


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_same_output_and_hits(arm: Arm, root: Path, tmp_path: Path) -> None:
    model = tiny_model(root / "build" / "models", arm.family)
    with stock(model, tmp_path, arm.flags) as server:
        right = answers(server)
    assert len({case.output for case in right}) > len(right) // 2, "a model that always says the same shows nothing"
    with ours(model, tmp_path, arm.flags) as server:
        got = answers(server)
        counters = server.vattn()
        batch = server.many([(case.prompt, case.new_tokens) for case in right], at_once=16)
    assert_same_outputs(right, [Answer(case.output, 0, case.cached_tokens, "length", {}) for case in got])
    assert_same_hits(right, [Answer(case.output, 0, case.cached_tokens, "length", {}) for case in got])
    assert_same_outputs(right, batch)
    assert counters["page_bytes"] == PAGE * arm.token_bytes
    assert counters["tokens_copied"] > 0, "no hit ended in mid-page"
    assert counters["batches_rows"] > 10 * counters["batches_pages"]


def test_adapters_share_nothing_and_change_the_output(llama: Path, tmp_path: Path) -> None:
    """LoRA: the base model and two adapters in turn, each against stock."""
    for seed, name in enumerate(LORA_NAMES):
        write_lora(tmp_path / name, llama, seed)
    paths = [f"{name}={tmp_path / name}" for name in LORA_NAMES]
    flags = ("--lora-backend=torch_native", "--lora-paths", *paths)
    adapters = (None, *LORA_NAMES)
    with stock(llama, tmp_path, flags) as server:
        right = answers(server, adapters)
    assert len({case.output for case in right[: len(adapters)]}) == len(adapters)
    with ours(llama, tmp_path, flags) as server:
        got = answers(server, adapters)
        assert server.vattn()["tokens_copied"] > 0
    assert_same_outputs(right, [Answer(case.output, 0, case.cached_tokens, "length", {}) for case in got])
    assert_same_hits(right, [Answer(case.output, 0, case.cached_tokens, "length", {}) for case in got])
