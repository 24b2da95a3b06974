# SPDX-License-Identifier: Apache-2.0
"""Engines side by side: whose turn it is, and on which processors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, cast

import psutil
import pytest

from benchmarks import beside
from benchmarks.beside import Place
from tests.support.server import SCHEDULER


class Stand:
    """In for an engine: remembers what it was asked."""

    def __init__(self, name: str, asked: list[tuple[str, Any]]) -> None:
        self.name, self.asked, self.seconds = name, asked, dict[str, list[float]]()

    def ask(self, order: Any) -> float:
        self.asked.append((self.name, order))
        return float(sum(not isinstance(order, Place) for _, order in self.asked))


def test_engines_begin_in_turns() -> None:
    """Each is given each order in each round; the first round, which compiles, is not kept."""
    asked: list[tuple[str, Any]] = []
    pair = [Stand("a", asked), Stand("b", asked)]
    beside.in_turns(cast(Any, pair), {"burst": "64", "lone": "1"}, times={"lone": 2}, rounds=2)
    one = ["64", "1", "1"]
    rounds = [("a", "b"), ("b", "a"), ("a", "b")]
    measured = [(name, order) for name, order in asked if not isinstance(order, Place)]
    assert measured == [(name, order) for names in rounds for name in names for order in one]
    assert pair[0].seconds == {"burst": [10, 13], "lone": [11, 12, 14, 15]}


def test_in_a_round_all_run_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any is measured, and in another than in the round before."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    asked: list[tuple[str, Any]] = []
    beside.in_turns(cast(Any, [Stand("a", asked), Stand("b", asked)]), {"lone": "1"}, times={}, rounds=4)
    of_rounds = [asked[i : i + 4] for i in range(0, len(asked), 4)]
    wanted = beside.places(range(8))
    assert len(of_rounds) == 5 and len(wanted) == 4
    for number, of_round in enumerate(of_rounds):
        place = wanted[number % 4]
        assert of_round[:2] == [("a", place), ("b", place)]
        assert sorted(of_round[2:]) == [("a", "1"), ("b", "1")]


@pytest.mark.parametrize("processors", [range(16), [2, 3, 6, 7, 8], range(2), [5]])
def test_a_place_lies_on_processors_that_are_there(processors: Sequence[int]) -> None:
    for place in (found := beside.places(processors)):
        assert {place.scheduler, *place.others} <= set(processors)
        if len(processors) >= 4:
            assert place.scheduler // 2 not in {other // 2 for other in place.others}
    assert len(found) == (len(processors) // 2 if len(processors) >= 4 else 1)


TITLED = f"import setproctitle; setproctitle.setproctitle({SCHEDULER!r}); print('ready', flush=True); input()"


def test_every_thread_moves_and_a_scheduler_to_its_own_processor() -> None:
    mine = os.sched_getaffinity(0)
    assert len(mine) > 1, "this test needs two processors"
    place = Place(min(mine), frozenset(mine - {min(mine)}))
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    with (
        subprocess.Popen([sys.executable, "-c", TITLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as scheduler,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
    ):
        try:
            assert scheduler.stdout and scheduler.stdout.readline() == b"ready\n"
            place.move()
            assert os.sched_getaffinity(scheduler.pid) == {place.scheduler}
            for moved in (other.pid, *(each.id for each in psutil.Process().threads())):
                assert os.sched_getaffinity(moved) == place.others
        finally:
            for each in psutil.Process().threads():
                os.sched_setaffinity(each.id, mine)
            over.set()
            thread.join()
            scheduler.kill()
            other.kill()
