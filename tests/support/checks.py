# SPDX-License-Identifier: Apache-2.0
"""Checks that many serving tests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.support.client import Answer
from tests.support.golden import Case
from tests.support.server import Server

#: A page is in exactly one of these states; the scheduler is told their sizes.
PAGE_STATES = ("free", "private", "evictable", "protected")


def until(condition: Callable[[], bool], what: str, limit_s: float = 60, every_s: float = 0.01) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(every_s)


def assert_same_outputs(cases: Sequence[Case], answers: Sequence[Answer]) -> None:
    """Token for token. On failure: how many differ, and where the first few do."""
    assert len(cases) == len(answers)
    wrong = []
    for i, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        if answer.finish != "length" or answer.output != case.output:
            pairs = zip(case.output, answer.output, strict=False)
            at = next((j for j, (a, b) in enumerate(pairs) if a != b), len(answer.output))
            wrong.append(
                f"case {i}: prompt {len(case.prompt)}, cached {answer.cached_tokens}, "
                f"{answer.finish}, differs at output {at} of {case.new_tokens}"
            )
    assert not wrong, f"{len(wrong)} of {len(cases)} differ:\n" + "\n".join(wrong[:8])


def assert_same_hits(cases: Sequence[Case], answers: Sequence[Answer]) -> None:
    """`cached_tokens` of every request, in a sequential run in which nothing is evicted."""
    wrong = [
        f"case {i}: prompt {len(case.prompt)}, cached {answer.cached_tokens}, stock {case.cached_tokens}"
        for i, (case, answer) in enumerate(zip(cases, answers, strict=True))
        if answer.cached_tokens != case.cached_tokens
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)} differ:\n" + "\n".join(wrong[:8])


def pages_in_use(server: Server) -> int:
    counters = server.vattn()
    assert sum(counters[state] for state in PAGE_STATES) == counters["num_pages"], counters
    return int(counters["num_pages"] - counters["free"])


@contextmanager
def unharmed(server: Server) -> Iterator[Server]:
    """Around a test: it starts from an empty cache, and a flush frees every page again.

    SGLang's own checks run in the server meanwhile; a leak ends it, or stands in its log.
    """
    server.flush()
    assert pages_in_use(server) == 0
    yield server
    server.flush()
    assert pages_in_use(server) == 0
    server.assert_clean()
