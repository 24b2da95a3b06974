# SPDX-License-Identifier: Apache-2.0
"""The oracle: what stock SGLang 0.5.23 at page size 1 answers, from its own real server.

Nothing of ours is loaded in that server (SGLANG_PLUGINS). A workload starts from an empty cache,
and the pool is so large that nothing is evicted. Where its requests run one at a time,
cached_tokens too are what an exact prefix cache must give.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.client import Answer, Client
from tests.support.server import NO_PLUGINS, Server
from tests.support.workload import WORKLOADS


class Case(NamedTuple):
    """A request and the right answer. A prompt that follows another has its output in it."""

    prompt: tuple[int, ...]
    new_tokens: int
    output: tuple[int, ...]
    cached_tokens: int  # right for a workload of one at a time


def stock_server(model: Path, folder: Path) -> Server:
    flags = ["--page-size=1", "--max-total-tokens=131072", "--chunked-prefill-size=8192"]
    return Server(model, folder, flags, env=NO_PLUGINS)


class Golden:
    """Answers of a stock server, each workload computed once a session, when first asked for.

    ``store`` is a folder that the session's test processes share: who asks first computes, under a lock; the others
    read. The server is started (by calling ``stock``) only where something has to be computed.
    """

    def __init__(self, stock: Callable[[], Client], store: Path) -> None:
        self.stock, self._store = stock, store
        store.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, workload: str) -> list[Case]:
        answers = self.once(workload, lambda: [list(case) for case in self._compute(workload)])
        return [Case(tuple(prompt), new, tuple(output), cached) for prompt, new, output, cached in answers]

    def once(self, name: str, compute: Callable[[], list[Any]]) -> list[Any]:
        """What ``compute`` returns, in JSON's types; computed by the first of all processes that asks."""
        path = self._store / f"{name}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(compute()))
        found: list[Any] = json.loads(path.read_text())
        return found

    def output(self, prompt: Sequence[int], new_tokens: int) -> tuple[int, ...]:
        """The right output of a prompt that is in no workload."""
        return self.stock().generate(prompt, new_tokens).output

    def _compute(self, workload: str) -> list[Case]:
        stock = self.stock()
        stock.flush()
        work = WORKLOADS[workload]()
        if work.at_once > 1:
            jobs = [(step.ids, step.new_tokens) for step in work.steps]
            answers = stock.many(jobs, work.at_once)
            return [self._case(*job, answer) for job, answer in zip(jobs, answers, strict=True)]
        cases: list[Case] = []
        for step in work.steps:
            before: tuple[int, ...] = ()
            if step.follows is not None:
                earlier = cases[step.follows]
                before = earlier.prompt + earlier.output
            prompt = before + step.ids
            cases.append(self._case(prompt, step.new_tokens, stock.generate(prompt, step.new_tokens)))
        return cases

    @staticmethod
    def _case(prompt: tuple[int, ...], new_tokens: int, answer: Answer) -> Case:
        assert len(answer.output) == new_tokens, answer
        return Case(prompt, new_tokens, answer.output, answer.cached_tokens)
