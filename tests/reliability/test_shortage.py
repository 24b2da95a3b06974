# SPDX-License-Identifier: Apache-2.0
"""Too little of everything: pages, rows, request slots, mappings. Requests wait, evict or retract; nothing hangs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.reliability.engine import Engine, Shape, settings
from tests.reliability.invariants import check, check_end, check_rows
from tests.reliability.model import Job


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings():
        yield


def serve(engine: Engine, jobs: list[Job], outputs: int = 12, chunk: int = 9) -> int:
    """Serve every job to its end, oldest first; returns the steps taken. A scheduler that is stuck fails here."""
    rng, waiting, steps = random.Random(1), list(jobs), 0
    while waiting or engine.running:
        steps += 1
        assert steps < 100 * len(jobs), f"stuck with {len(waiting)} waiting and {len(engine.running)} running"
        if not any(run.in_prefill for run in engine.running):
            began = engine.admit(waiting, chunk)
            del waiting[: len(began)]
        for run in engine.running:
            if run.in_prefill:
                engine.continue_prefill(run, chunk)
            elif len(run.req.output_ids) == 0:
                engine.checkpoint(run)
        retracted = engine.tried["retracted"]
        before = list(engine.running)
        engine.decode([rng.randrange(3)])
        if engine.tried["retracted"] > retracted:
            waiting = [run.job for run in before if run not in engine.running] + waiting
        for run in engine.running[:]:
            if len(run.req.output_ids) >= outputs:
                engine.release(run, checkpoint=True)
        check(engine)
        check_rows(engine)
    return steps


def mixed_jobs(count: int, seed: int = 3) -> list[Job]:
    rng = random.Random(seed)
    documents = [[rng.randrange(3) for _ in range(30)] for _ in range(3)]
    return [
        Job((*rng.choice(documents)[: rng.randrange(1, 28)], *rng.choices(range(3), k=rng.randrange(1, 5))), new_tokens=1)
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(pages=12, slots=8),  # a tenth of what all requests together hold
        Shape(pages=60, slots=8, rows=2),
        Shape(pages=60, slots=2),
        Shape(pages=60, slots=8, max_mappings=3),
        Shape(pages=14, slots=8, rows=1, max_mappings=2, read_ahead=9),
    ],
    ids=["pages", "rows", "slots", "mappings", "everything"],
)
def test_all_are_served(shape: Shape) -> None:
    engine = Engine(shape)
    serve(engine, mixed_jobs(40))
    if shape.pages < 20:
        assert engine.tried["waits"] > 0
    assert engine.tried["read_by_paged"] > 0
    check_end(engine)
    engine.close()


def test_no_row_is_waited_for_that_cannot_come() -> None:
    """--vattn-read rows waits for mappings; not where the pages to be mapped are missing."""
    engine = Engine(Shape(pages=6, read="rows", read_ahead=30))
    began = time.perf_counter()
    serve(engine, mixed_jobs(6))
    assert time.perf_counter() - began < 8  # one wait in vain takes ten
    assert engine.tried["read_by_paged"] > 0
    check_end(engine)
    engine.close()


@pytest.mark.parametrize("shape", [Shape(pages=60, rows=2, read="rows"), Shape(pages=60, read="rows", max_mappings=3)])
def test_no_row_is_waited_for_when_rows_or_mappings_are_used_up(shape: Shape) -> None:
    engine = Engine(shape)
    began = time.perf_counter()
    serve(engine, mixed_jobs(12))
    assert time.perf_counter() - began < 8
    assert engine.tried["read_by_paged"] > 0
    check_end(engine)
    engine.close()
