# SPDX-License-Identifier: Apache-2.0
"""Deterministic prompt sets. Each hits one of the places where a prefix cache goes wrong.

A prompt is a list of token ids below 256 (any byte). Two prompts that are meant to share
exactly t tokens differ at position t by construction, so `cached_tokens` is predictable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One request. With `follows`, its prompt is that step's prompt and output, then `ids`."""

    ids: tuple[int, ...]
    new_tokens: int
    follows: int | None = None


@dataclass
class Workload:
    """Steps in the order in which they are sent: one at a time, unless `at_once` is more."""

    seed: int
    at_once: int = 1
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(count)]

    def other_than(self, token: int) -> int:
        return (token + 1 + self.random.randrange(255)) % 256

    def add(self, ids: Sequence[int], new_tokens: int, follows: int | None = None) -> int:
        self.steps.append(Step(tuple(ids), new_tokens, follows))
        return len(self.steps) - 1

    def sharing(self, document: Sequence[int], shared: int, tail: int, new_tokens: int) -> int:
        """A prompt that shares exactly `shared` tokens with `document`, then goes its own way."""
        follow = [self.other_than(document[shared])] if shared < len(document) else []
        own = follow + self.tokens(tail - len(follow))
        return self.add([*document[:shared], *own], new_tokens)


def corner_lengths(page: int) -> list[int]:
    """Shared lengths: k pages + {-1, 0, 1} for k = 0..3, and some shorter than a page."""
    around = {k * page + d for k in range(4) for d in (-1, 0, 1)}
    return sorted(n for n in around | {2, page // 2} if n > 0)


def corners(page: int, documents: int, brief: bool = False) -> Workload:
    """Around page borders: shared, equal, nested, branching, and conversations.

    Of two documents, one is sent whole at first (later prompts split its nodes), and one grows
    from its shortest prefix on (later prompts extend them). `brief` leaves out what costs most
    with very large pages: the prefixes that equal a whole prompt, and all branches but one.
    """
    work = Workload(seed=1)
    for number in range(documents):
        document = work.tokens(3 * page + page // 2 + 3)
        lengths = corner_lengths(page)
        if number % 2 == 0:
            work.add(document, 5)
            lengths.reverse()
        for shared in lengths:
            work.sharing(document, shared, tail=1 + work.random.randrange(page // 4 + 3), new_tokens=4)
        for length in [] if brief else lengths:  # all of the prompt is cached: all but a token hits
            work.add(document[:length], 3)
        whole = work.add(document, 9)
        work.add(document, 9)
        _branches(work, document, page, 1 if brief else 3)
        _conversation(work, whole, page)
    return work


def _branches(work: Workload, document: Sequence[int], page: int, count: int) -> None:
    """A tree under one document: branches at, before and after a border, and one in a branch."""
    for cut in (page + page // 3, page + page // 3 + 1, 2 * page)[:count]:
        own = work.tokens(page + 5)
        work.add([*document[:cut], *own], 4)
        work.add([*document[:cut], *own[: page // 2], *work.tokens(7)], 4)
    nested = list(document[: page // 2 + 1])
    for _ in range(3):
        nested += work.tokens(page // 2 + 1)
        work.add(nested, 3)


def _conversation(work: Workload, first: int, page: int) -> None:
    """Turns that re-send everything so far. Outputs of a page and more cross a border."""
    turn = first
    for question in (1, min(page // 2, 60), 7):
        turn = work.add(work.tokens(question), min(page + 2, 40), follows=turn)


def stress(count: int = 72, seed: int = 7) -> Workload:
    """Random cuts of four documents, with outputs of up to 40 tokens."""
    work = Workload(seed, at_once=8)
    documents = [work.tokens(400) for _ in range(4)]
    for _ in range(count):
        document = work.random.choice(documents)
        shared = work.random.randrange(1, 400)
        work.sharing(document, shared, 1 + work.random.randrange(60), 1 + work.random.randrange(40))
    return work


def growing(count: int = 24, seed: int = 9) -> Workload:
    """Short prompts with long outputs: what a scheduler admits outgrows a small pool later."""
    work = Workload(seed, at_once=8)
    document = work.tokens(60)
    for _ in range(count):
        work.sharing(document, work.random.randrange(20, 60), 1 + work.random.randrange(20), 120)
    return work


#: name -> how to make it. The numbers after "corners" are tokens a page.
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "corners-16": lambda: corners(16, documents=4),
    "corners-128": lambda: corners(128, documents=2),
    "corners-1024": lambda: corners(1024, documents=1, brief=True),
    "stress": stress,
    "growing": growing,
}
