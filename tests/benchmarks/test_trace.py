# SPDX-License-Identifier: Apache-2.0
"""The simulated replay against a model that needs no tree: sets of cached prefixes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.trace import BLOCK, TraceRequest, answer, fitting, ideal_hit_rate, prompt, read_trace, tokens_of

pytest.importorskip("sglang")

from benchmarks.common import RESULTS
from benchmarks.dry import Vattn
from benchmarks.dry_stock import Stock
from benchmarks.trace_replay import ARMS, POOLS, simulate

PAGE = 128


def synthetic(count: int, seed: int = 0) -> list[TraceRequest]:
    """Conversations that grow, branch and repeat, over few blocks; some prompts end in mid-block."""
    rng = random.Random(seed)
    known: list[tuple[int, ...]] = [()]
    fresh = iter(range(10**6))
    out: list[TraceRequest] = []
    for number in range(count):
        blocks = rng.choice(known)[: rng.randrange(6)]
        blocks += tuple(next(fresh) for _ in range(rng.randrange(1, 4)))
        if out and rng.random() < 0.2:
            blocks = rng.choice(out).blocks
        known.append(blocks)
        length = len(blocks) * BLOCK - rng.choice((0, 0, 1, 63, 200, 511))
        out.append(TraceRequest(number, float(number), length, rng.randrange(1, 300), blocks))
    return out


def common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def expected_hits(requests: list[TraceRequest], page: int) -> list[int]:
    """What an unbounded cache exact to ``page`` tokens gives each request: by comparing with every earlier one."""
    kept: list[list[int]] = []
    hits = []
    for request in requests:
        tokens = prompt(request).tolist()
        best = max((common(tokens[:-1], other) for other in kept), default=0)
        hits.append(best // page * page)
        whole = tokens + answer(request).tolist()
        kept.append(whole[: len(whole) // page * page])
    return hits


@pytest.mark.parametrize(("arm", "page"), [("vattn", 1), ("stock_page1", 1), ("stock_page64", 64)])
def test_hits_of_an_unbounded_pool_are_those_of_the_model(arm: str, page: int) -> None:
    requests = synthetic(40)
    pool = 10**6
    cache = Vattn(pool, 10_000) if arm == "vattn" else Stock(pool, 10_000, page)
    hits = [cache.run(prompt(request) + answer(request), request.input_length) for request in requests]
    cache.close()
    assert hits == expected_hits(requests, page)
    assert any(hits)


def test_a_pool_under_pressure_keeps_its_books_and_maps_what_it_should() -> None:
    requests = synthetic(60, seed=1)
    row = simulate("vattn", 64 * PAGE, requests)
    assert row["requests"] + row["skipped"] == len(requests) and row["skipped"] < len(requests)
    assert row["tokens_evicted"] > 0 and row["errors"] == 0
    assert row["unmap_calls"] == row["requests"]  # one a row
    assert row["pages_mapped"] == row["pages_unmapped"] > row["pages_aliased"]
    assert row["hit_tokens"] == row["pages_aliased"] * PAGE + row["tokens_copied"]
    assert 0 <= row["hit_rate"] <= row["ideal_hit_rate"] + row["tokens_copied"] / row["prompt_tokens"]


def test_every_arm_skips_the_same_requests() -> None:
    requests = synthetic(20, seed=2)
    rows = [simulate(arm, 20 * PAGE, requests) for arm in ("vattn", "stock_page1", "stock_page128")]
    assert len({(row["requests"], row["skipped"], row["ideal_hit_rate"]) for row in rows}) == 1
    assert rows[0]["skipped"] == len(requests) - len(list(fitting(requests, 20 * PAGE)))


def test_the_measured_hit_rates_are_what_the_documents_say() -> None:
    """Never below stock's page 1 by more than 0.005, above its page 64 at every pool size, within five minutes."""
    rows = json.loads((RESULTS / "cpu" / "trace_replay.json").read_text())["rows"]
    found = {(row["pool_tokens"], row["arm"]): row for row in rows}
    assert {pool for pool, _ in found} == set(POOLS) and {arm for _, arm in found} == set(ARMS)
    for pool in POOLS:
        ours = found[pool, "vattn"]
        assert ours["hit_rate"] >= found[pool, "stock_page1"]["hit_rate"] - 0.005, pool
        assert ours["hit_tokens"] > found[pool, "stock_page64"]["hit_tokens"], pool
        assert ours["replay_s"] < 300, pool


def test_equal_ids_and_nothing_else_give_equal_tokens() -> None:
    assert tokens_of((7, 8), 700) == tokens_of((7, 8, 9), 1536)[:700]
    assert tokens_of((7,), BLOCK) != tokens_of((8,), BLOCK)
    assert len(set(tokens_of(range(20), 20 * BLOCK))) > 20 * BLOCK - 5
    small = tokens_of((7,), BLOCK, vocabulary=300)
    assert max(small) < 300 and min(small) >= 0


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 512, "output_length": 5, "hash_ids": [1]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    requests = read_trace(path)
    assert [request.arrival_s for request in requests] == [1.0, 2.0]
    assert ideal_hit_rate(requests) == 512 / 1112
    path.write_text(json.dumps({**lines[0], "hash_ids": [1]}))
    with pytest.raises(ValueError, match="line 1: too few blocks"):
        read_trace(path)
