# SPDX-License-Identifier: Apache-2.0
"""Two schedulers' bookkeeping in step, a thread each, that vote as ranks do: one of them maps late or not at all.

The engine compares, at each forward and on each rank, what would be read with what was written, by the way that the
ranks agreed on. With real processes: test_ranks.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from sglang_vattn.ranks import Ranks, RanksParted, decisions
from tests.reliability.engine import Engine, Shape, settings
from tests.reliability.invariants import check_end
from tests.reliability.serve import mixed_jobs, serve

SHAPE = Shape(pages=24, slots=4, read_ahead=5)
JOBS = mixed_jobs(400, seed=8)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings():
        yield


class Table:
    """Where ranks that are threads meet: each leaves its ballot, and takes the least of all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.ballots: list[torch.Tensor] = [torch.empty(0)] * size
        self.votes = 0

    def least(self, rank: int, ballot: torch.Tensor) -> None:
        self.ballots[rank] = ballot.clone()
        self.votes += rank == 0
        self.barrier.wait()
        ballot.copy_(torch.stack(self.ballots).amin(0))
        self.barrier.wait()


class ThreadRanks(Ranks):
    def __init__(self, rank: int, table: Table, engine: Engine) -> None:
        super().__init__(rank, 2, table, partial(decisions, engine.allocator))

    def _least(self, ballot: torch.Tensor) -> None:
        self._group.least(self.rank, ballot)


Steps = list[tuple[object, ...]]


class Pair:
    """Two engines that vote. `told[r]`: after each of rank r's steps, what was decided; `late[r]`: its mapping."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        self.table = Table(2)
        self.engines = [Engine(shape) for _ in range(2)]
        self.told: list[Steps] = [[], []]
        self.mapped: list[list[int]] = [[], []]
        for rank, engine in enumerate(self.engines):
            engine.reading.ranks = ThreadRanks(rank, self.table, engine)

    def run(self, between: Callable[[int, Engine], None] = lambda rank, engine: None, outputs: int = 6) -> None:
        """Serve all jobs on both; ``between`` two steps of a rank."""

        def one(rank: int) -> None:
            engine = self.engines[rank]

            def step() -> None:
                reading = engine.reading
                self.told[rank].append((
                    *decisions(engine.allocator).values(), engine.allocator.available_size(),
                    engine.tree.evictable_size(), [record.pages for record in engine.allocator.requests.values()],
                    reading.variant, reading.by_rows, [(group.members, group.node.end) for group in reading.groups],
                ))  # fmt: skip
                self.told[rank][-1] = (repr(self.told[rank][-1]),)
                self.mapped[rank].append(engine.space.stats()["pages_mapped"])
                between(rank, engine)

            try:
                serve(engine, JOBS, outputs, after_step=step)
            except BaseException:
                self.table.barrier.abort()
                raise

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(one, rank) for rank in range(2)]
        # The rank that failed first broke the barrier for the other.
        errors = [each.exception() for each in running]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error

    def close(self) -> None:
        for engine in self.engines:
            check_end(engine)
            engine.close()


@pytest.mark.parametrize("read", ["auto", "rows"])
def test_a_late_rank_decides_as_the_other(read: str) -> None:
    pair = Pair(SHAPE._replace(read=read))
    pair.engines[1].driver.set_delay("map", 0.002)

    def catch_up_now_and_then(rank: int, engine: Engine) -> None:
        if len(pair.told[rank]) % 4 == 0:
            engine.settle()

    pair.run(catch_up_now_and_then)
    assert pair.told[0] == pair.told[1]
    assert len(pair.told[0]) > 500
    tried = [engine.tried for engine in pair.engines]
    for way in ("rows", "paged", "shared") if read == "auto" else ("rows", "shared"):
        assert tried[0][f"read_by_{way}"] == tried[1][f"read_by_{way}"] > 0, way
    assert tried[0]["groups"] == tried[1]["groups"] > 0
    apart = sum(a != b for a, b in zip(*pair.mapped, strict=True))
    assert apart > 100, "the ranks were to be out of step"
    pair.engines[1].driver.set_delay("map", 0)
    pair.close()


def test_a_rank_whose_map_fails_tells_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1's maps fail all the time, rank 0's never: both read by pages where rank 1 must."""
    pair = Pair()

    def fail(rank: int, engine: Engine) -> None:
        if rank == 1 and not engine.driver.armed:
            engine.driver.fail_at("map", 1)

    pair.run(fail)
    assert pair.told[0] == pair.told[1]
    healthy, failing = pair.engines
    assert healthy.space.stats()["errors"] == 0 < failing.space.stats()["errors"]
    assert healthy.tried["read_by_paged"] == failing.tried["read_by_paged"] > 300
    told = [record.message for record in caplog.records if "reads by pages" in record.message]
    assert 0 < len(told) <= 3 and "map" in told[0], "in the log, and not at every call"
    failing.driver.fail_at("map", 0)
    pair.close()


def test_what_all_have_affirmed_needs_no_other_vote() -> None:
    pair = Pair(SHAPE._replace(page_size=16, pages=14))
    pair.run(lambda rank, engine: engine.settle(), outputs=14)
    forwards = sum(pair.engines[0].tried[f"read_by_{way}"] for way in ("rows", "paged", "shared"))
    print(f"\n{pair.table.votes} votes, {forwards} forwards")
    assert 0 < pair.table.votes < 0.9 * forwards
    pair.close()


def test_ranks_that_have_parted_are_found() -> None:
    """A decision that depends on timing: rank 1 evicts a page when its mapping thread is behind."""
    pair = Pair()
    pair.engines[1].driver.set_delay("map", 0.002)

    def plant(rank: int, engine: Engine) -> None:
        if engine.space.stats()["queued_jobs"]:
            engine.tree.evict_pages(1)

    with pytest.raises(
        RanksParted, match=r"tensor-parallel rank \d of 2: the ranks' caches differ: .*evictable \d+ here"
    ):
        pair.run(plant)
    for engine in pair.engines:
        engine.close()
