# SPDX-License-Identifier: Apache-2.0
"""Too little of everything: pages, rows, request slots, mappings. Requests wait, evict or retract; nothing hangs."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import psutil
import pytest

from sglang_vattn._core import DriverError
from tests.reliability.engine import Engine, Shape, settings
from tests.reliability.invariants import check_end
from tests.reliability.model import Job
from tests.reliability.serve import mixed_jobs, serve


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings():
        yield


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
    if shape.slots > 2:  # no row can be made for some, however quick the mapping thread is
        assert engine.tried["read_by_paged"] > 0
    check_end(engine)
    engine.close()


def test_a_twin_that_ends_leaves_room_for_the_next_chunk() -> None:
    """Two equal prompts are computed at once, one in chunks. The other ends, and its pages are evictable: they stay so.

    Found by the state machine after 550,000 steps: the chunked one locked them at its next checkpoint, though it has
    pages of its own, and then there was no page for its next chunk. SGLang ends the server there.
    """
    engine = Engine(Shape(pages=11, slots=3))
    prompt = tuple(range(20))
    chunked, twin = engine.admit([Job(prompt, 1), Job(prompt[:16], 0)], 16)
    engine.checkpoint(twin)
    engine.release(twin, checkpoint=True)
    assert engine.allocator.pages.evictable == 4
    engine.checkpoint(chunked)
    assert engine.allocator.pages.evictable == 4
    (other,) = engine.admit([Job((7,) * 12, 1)], 100)  # takes every page that is free
    engine.continue_prefill(chunked, 4)
    assert engine.tried["chunks"] == 1
    for run in (chunked, other):
        engine.release(run, checkpoint=True)
    check_end(engine)
    engine.close()


def test_no_row_is_waited_for_that_cannot_come() -> None:
    """--vattn-read rows waits for mappings; not where the pages to be mapped are missing."""
    engine = Engine(Shape(pages=11, slots=8, read="rows", read_ahead=30))
    began = time.perf_counter()
    serve(engine, mixed_jobs(12))
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


def test_a_pool_for_which_there_is_no_memory_or_no_room_names_the_flags() -> None:
    """Another process may take memory between SGLang's profiling and ours; more rows may be asked for than fit."""
    with pytest.raises(DriverError, match=r"create: .*lower --mem-fraction-static or --max-total-tokens"):
        Engine(Shape(), fail_first="create")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:  # 256 MiB of addresses are left, 100,000 rows want 5 GiB
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (256 << 20), hard))
        with pytest.raises(DriverError, match=r"ENOMEM.*lower --vattn-rows or --context-length"):
            Engine(Shape(rows=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    Engine(Shape(rows=100_000)).close()
