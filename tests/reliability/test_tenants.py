# SPDX-License-Identifier: Apache-2.0
"""Requests of different extra keys, LoRA ids and cache salts never share a page, whatever the ids are."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from tests.reliability.engine import Engine, Run, Shape, settings
from tests.reliability.invariants import check_end
from tests.reliability.model import Job, Namespace, seed
from tests.support.checks import unharmed
from tests.support.client import Answer
from tests.support.server import Server

# SGLang's own key has extra key and LoRA id concatenated: most of these meet there, or when printed.
CRAFTED: list[Namespace] = [
    (None, None, None),
    ("ab", None, None), ("a", "b", None), (None, "ab", None), ("abab", None, None), ("ab", "ab", None),
    ("a", None, "b"), (None, "a", "b"), (None, None, "ab"), ("('a', 'b', '')", None, None), ("a\0b", None, None),
    ("None", None, None), (None, "None", None), ("b", "b", None), ("bb", None, None), ("bb", "b", None),
]  # fmt: skip


def test_crafted_ids_never_share_a_page() -> None:
    prompt = (0,) * 21
    with settings():
        engine = Engine(Shape(pages=16 * len(CRAFTED), slots=len(CRAFTED)))
        runs: dict[Namespace, Run] = {}
        for tenant in CRAFTED:
            (runs[tenant],) = engine.admit([Job(prompt, namespace=tenant)], 100)
            engine.checkpoint(runs[tenant])
        pages = {tenant: set(engine.allocator.requests[run.req.kv.req_pool_idx].pages) for tenant, run in runs.items()}
        for one, other in itertools.combinations(CRAFTED, 2):
            assert seed(one) != seed(other)
            assert not pages[one] & pages[other], f"{one} and {other} share pages"
        # Retracted and admitted again, each finds its own, and so do later requests.
        for tenant in CRAFTED:
            job = engine.retract(runs[tenant])
            (again,) = engine.admit([job._replace(tokens=prompt)], 100)
            assert again.req.prefix_len == len(prompt) - 1
            held = engine.allocator.requests[again.req.kv.req_pool_idx]
            assert set(held.pages[: held.shared]) <= pages[tenant]
            engine.release(again, checkpoint=True)
        check_end(engine)
        engine.close()


@pytest.mark.parametrize("scrub", [True, False])
def test_a_page_that_changes_tenant_is_zeroed_first(scrub: bool) -> None:
    """`--vattn-scrub`; the engine looks into the pages after what is queued for a forward and before it writes."""
    rng = random.Random(17)
    with settings():
        engine = Engine(Shape(pages=20, read_ahead=5, scrub=scrub))
        found = 0
        for step in range(60):
            tenant = CRAFTED[rng.randrange(4)]
            began = engine.admit([Job(tuple(rng.choices(range(3), k=rng.randrange(1, 30))), 2, tenant)], 100)
            for run in began:
                engine.checkpoint(run)
            engine.decode([step % 3])
            for run in engine.running[:]:
                if not scrub:
                    try:
                        engine.check_scrubbed(run)
                    except AssertionError:
                        found += 1
                if rng.randrange(3) == 0:
                    engine.release(run, checkpoint=step % 2 == 0)
            if step % 20 == 19:  # what is queued for pages that nobody has any more is dropped with them
                for run in engine.running[:]:
                    engine.release(run, checkpoint=False)
                engine.flush()
        for run in engine.running[:]:
            engine.release(run, checkpoint=False)
        check_end(engine)
        assert (engine.allocator.scrub.pages_scrubbed > 20) == scrub
        assert (found > 0) != scrub, "without the flag old bytes must be seen, or this test sees nothing"
        engine.close()


def test_one_tenant_alone_is_never_scrubbed() -> None:
    """Not after a flush of the cache either, unless that dropped a zeroing."""
    with settings():
        engine = Engine(Shape(pages=20, read_ahead=5))
        for _ in range(3):
            (run,) = engine.admit([Job(tuple(range(30)), 2, CRAFTED[0])], 100)
            engine.decode([1])
            engine.release(run, checkpoint=True)
            engine.flush()
        assert engine.allocator.scrub.pages_scrubbed == 0
        engine.close()


def ask(server: Server, tenant: dict[str, str], prompt: list[int]) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return Answer.parse(
        json.loads(server.text("/generate", {**tenant, "input_ids": prompt, "sampling_params": sampling}))
    )


def test_over_http(small: Server) -> None:
    """`extra_key` and `cache_salt` in requests; the first of each tenant must find nothing."""
    prompt = random.Random(31).choices(range(256), k=70)
    tenants: list[dict[str, str]] = [
        {},
        {"extra_key": "ab"},
        {"extra_key": "a", "cache_salt": "b"},
        {"cache_salt": "ab"},
        {"extra_key": "abb"},
    ]
    with unharmed(small):
        outputs = []
        for tenant in tenants:
            first, second = (ask(small, tenant, prompt) for _ in range(2))
            assert (first.cached_tokens, second.cached_tokens) == (0, len(prompt) - 1), tenant
            outputs += [first.output, second.output]
        assert len(set(outputs)) == 1
        # Nothing of a request in what operators see of others.
        seen = small.text("/metrics") + small.text("/server_info")
        assert str(prompt)[1:-1] not in seen
        assert "abb" not in seen
