# SPDX-License-Identifier: Apache-2.0
"""Every driver call of a scripted serve fails at every k, or is slow.

The row concerned is read by pages, everybody's content is right (the engine compares it at each step, by the way that
was chosen), nothing is lost, and those who come later have rows again. What fails while a pool is built, before any
request: tests/core/test_faults.py, and the last test here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from sglang_vattn._core import DriverError
from tests.reliability.engine import Engine, Shape, settings
from tests.reliability.invariants import check_end
from tests.reliability.model import Job
from tests.reliability.serve import mixed_jobs, serve
from tests.support.maps import mapped_pages

SHAPE = Shape(pages=40, slots=3, read_ahead=5)
SCRIPT: list[Job] = mixed_jobs(8, seed=5)
OUTPUTS = 6


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings():
        yield


def scripted_engine() -> Engine:
    """One whose mapping thread catches up before each forward: the calls are the same in each run."""
    engine = Engine(SHAPE, share=False)
    engine.settled = True
    return engine


def calls_of_a_serve() -> dict[str, int]:
    engine = scripted_engine()
    before = engine.driver.calls()
    serve(engine, SCRIPT, outputs=OUTPUTS)
    assert engine.tried["read_by_paged"] == 0
    assert engine.space.drain(10)
    after = engine.driver.calls()
    engine.close()
    return {call: after[call] - before.get(call, 0) for call in ("map", "set_access", "unmap")}


@pytest.mark.parametrize("call", ["map", "set_access", "unmap"])
def test_the_kth_call_fails(call: str) -> None:
    total = calls_of_a_serve()[call]
    assert total >= 6
    for k in range(1, total + 1):
        engine = scripted_engine()
        engine.driver.fail_at(call, k)
        serve(engine, SCRIPT, outputs=OUTPUTS)
        assert engine.space.drain(10)
        assert not engine.driver.armed
        assert engine.space.stats()["errors"] == 1
        # A map that fails is felt, by its request alone; a row that is not unmapped harms nobody.
        by_pages = engine.tried["read_by_paged"]
        assert 1 <= by_pages <= OUTPUTS + 4 if call != "unmap" else by_pages == 0, f"{call} {k}: {by_pages}"

        # Those who come later find rows, all mapped.
        engine.flush()
        serve(engine, SCRIPT, outputs=OUTPUTS)
        assert engine.tried["read_by_paged"] == by_pages, f"{call} {k}"
        check_end(engine)
        assert engine.space.stats()["errors"] == 1
        engine.close()


def test_all_calls_fail() -> None:
    """No row is ever mapped: everything by pages."""
    engine = Engine(SHAPE)
    for step in range(300):
        engine.driver.fail_at("map", 1)
        if not engine.running:
            engine.admit(SCRIPT[step % 6 : step % 6 + 3], 100)
        engine.decode([step % 3])
        for run in engine.running[:]:
            if len(run.req.output_ids) >= OUTPUTS:
                engine.release(run, checkpoint=True)
    assert engine.tried["read_by_paged"] > 50
    assert engine.space.stats()["errors"] > 50
    for run in engine.running[:]:
        engine.release(run, checkpoint=False)
    engine.driver.fail_at("map", 0)
    check_end(engine)
    engine.close()


@pytest.mark.parametrize("call", ["map", "set_access", "unmap"])
@pytest.mark.parametrize("seconds", [0.0005, 0.02])
def test_slow_calls_hold_nobody_up(call: str, seconds: float) -> None:
    engine = Engine(SHAPE)
    engine.driver.set_delay(call, seconds)
    began = time.perf_counter()
    serve(engine, SCRIPT * 3, outputs=OUTPUTS)
    took = time.perf_counter() - began
    calls = engine.driver.calls()[call]
    engine.driver.set_delay(call, 0)
    if seconds == 0.02 and call == "map":
        assert engine.tried["read_by_paged"] > 0
        assert took < calls * seconds + 5
    check_end(engine)
    engine.close()


def test_the_same_whatever_the_mapping_does() -> None:
    """What a scheduler is told depends on no timing and no fault: ranks would part ways."""
    told = []
    for delay, faults in ((0.0, False), (0.003, False), (0.0, True)):
        engine = Engine(SHAPE._replace(pages=16))
        engine.driver.set_delay("map", delay)
        log: list[tuple[int, ...]] = []

        def step(engine: Engine = engine, faults: bool = faults, log: list[tuple[int, ...]] = log) -> None:
            pages = engine.allocator.pages
            log.append((pages.free, pages.private, pages.evictable, pages.protected, engine.allocator.hit_tokens))
            if faults and not engine.driver.armed:
                engine.driver.fail_at("map", 2)

        serve(engine, SCRIPT * 2, outputs=OUTPUTS, after_step=step)
        told.append(log)
        engine.close()
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("call", ["reserve", "create", "map", "set_access", "write", "read"])
def test_a_pool_that_cannot_be_built_leaves_nothing(call: str) -> None:
    before = mapped_pages_of_this_process()
    with pytest.raises(DriverError, match=call):
        Engine(SHAPE, fail_first=call)
    assert mapped_pages_of_this_process() == before


def mapped_pages_of_this_process() -> int:
    return len(mapped_pages(os.getpid(), 4096))
