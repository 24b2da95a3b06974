# SPDX-License-Identifier: Apache-2.0
"""Random requests over tiny pools, against the oracle in simulation.py. A failure names page size and seed."""

from __future__ import annotations

import random
from array import array
from collections.abc import Hashable

import pytest
from sglang_vattn.radix import POLICIES

from tests.radix.simulation import Engine

# Equal when concatenated or printed, different as values: none may ever share a token.
CRAFTED: list[Hashable] = [None, "", "ab", ("a", "b"), ("ab", ""), ("", "ab"), ("ab", None), ("a", "b", None), b"ab"]


def prompt(rng: random.Random, longest: int) -> array[int]:
    """Mostly zeros, so that prompts share prefixes of any length and part at any offset in a page."""
    return array("q", [int(rng.random() < 0.08) for _ in range(rng.randint(1, longest))])


@pytest.mark.parametrize("page_size", range(1, 17))
def test_fuzz(page_size: int) -> None:
    for seed in range(3):
        rng = random.Random(f"{page_size} {seed}")
        num_pages = rng.choice((3, 5, 9, 14)) + 12 // page_size
        engine = Engine(num_pages, page_size, POLICIES[(page_size + seed) % len(POLICIES)])
        namespaces = rng.sample(CRAFTED, 3)
        for step in range(240):
            random_step(engine, rng, namespaces, longest=3 * page_size + 2)
            assert not engine.tree.check_integrity(), (page_size, seed, step)
            if step % 8 == 0:
                engine.check()
        for request in engine.running[:]:
            engine.leave(request, checkpoint=rng.random() < 0.5)
        engine.check()
        assert engine.store.private == engine.store.protected == 0
        engine.evict(num_pages)
        assert engine.store.free == num_pages, "pages leaked"
        assert engine.tree.num_nodes == engine.tree.num_tokens == 0
        assert not engine.tree.root_node.children, "a namespace outlived its content"


def random_step(engine: Engine, rng: random.Random, namespaces: list[Hashable], longest: int) -> None:
    kind = rng.random()
    request = rng.choice(engine.running) if engine.running else None
    if request is None or kind < 0.3:
        tokens = prompt(rng, longest)
        request = engine.admit(tokens, rng.choice(namespaces), rng.choice((None, None, rng.randint(1, len(tokens)))))
        if request is not None and rng.random() < 0.8:
            engine.checkpoint(request)
    elif kind < 0.6:
        engine.compute(request, prompt(rng, 1 if rng.random() < 0.7 else engine.size))
    elif kind < 0.7:
        # Not below its shared pages: the lock that holds them moves to where the checkpoint ends.
        engine.checkpoint(request, rng.randint(max(1, request.shared * engine.size), len(request.tokens)))
    elif kind < 0.85:
        engine.leave(request, checkpoint=rng.random() < 0.75)
    elif kind < 0.93:  # a waiting request: matched on every step, never locked
        tokens = prompt(rng, longest)
        engine.match(tokens, rng.choice(namespaces), rng.choice((None, rng.randint(0, len(tokens)))))
        engine.tree.touch(tokens, rng.choice(namespaces))
    else:
        engine.evict(rng.randint(1, 3))
