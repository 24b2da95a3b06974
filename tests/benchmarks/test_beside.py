# SPDX-License-Identifier: Apache-2.0
"""Engines side by side: whose turn it is, and on which processors."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest

from benchmarks import beside
from benchmarks.beside import Place
from benchmarks.common import ROOT


class Stand:
    """In for an engine: remembers what it was asked."""

    def __init__(self, name: str, asked: list[tuple[str, Any]]) -> None:
        self.name, self.asked = name, asked
        self.seconds: dict[str, list[float]] = {}
        self.processors: list[int] = []

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
    assert len(of_rounds) == 5
    used = [of_round[0][1] for of_round in of_rounds]
    assert set(used) == set(beside.places(range(8))) and all(a != b for a, b in itertools.pairwise(used))
    for place, of_round in zip(used, of_rounds, strict=True):
        assert of_round[:2] == [("a", place), ("b", place)]
        assert sorted(of_round[2:]) == [("a", "1"), ("b", "1")]


def test_each_arm_begins_in_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a place that is slow at first would always be the same one's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    asked: list[tuple[str, Any]] = []
    beside.in_turns(cast(Any, [Stand("a", asked), Stand("b", asked)]), {"lone": "1"}, times={}, rounds=7)
    of_rounds = [asked[i : i + 4] for i in range(0, len(asked), 4)]
    assert len({(of_round[0][1], of_round[2][0]) for of_round in of_rounds}) == 8


def test_a_ratio_is_that_of_the_rounds_medians() -> None:
    ours = {"rounds": 2, "raw": {"burst": [4.0, 6.0], "lone": [1.0, 9.0, 2.0, 5.0, 5.0, 5.0]}}
    other = {"rounds": 2, "raw": {"burst": [2.0, 2.0], "lone": [4.0, 4.0, 4.0, 1.0, 10.0, 99.0]}}
    assert beside.by_round(ours, other, "burst") == [2.0, 3.0]
    assert beside.by_round(ours, other, "lone") == [0.5, 0.5]


@pytest.mark.parametrize("processors", [range(16), [2, 3, 6, 7, 8], range(2), [5]])
def test_a_place_lies_on_processors_that_are_there(processors: Sequence[int]) -> None:
    for place in (found := beside.places(processors)):
        assert {place.scheduler, *place.others} <= set(processors)
        if len(processors) >= 4:
            assert place.scheduler // 2 not in {other // 2 for other in place.others}
    assert len({place.scheduler for place in found}) == (len(processors) // 2 if len(processors) >= 4 else 1)


# A process with another thread, that says when it is up.
TITLED = """
import setproctitle, sys, threading
setproctitle.setproctitle(sys.argv[1])
threading.Thread(target=input).start()
print("up", flush=True)
"""
# An arm's: it starts a scheduler and another, moves all, and says where whose threads are.
MOVED = """
import json, os, subprocess, sys
import psutil
from benchmarks.beside import Place
from tests.support.server import SCHEDULER

processes = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1], name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for name in (SCHEDULER, "other")
]
for process in processes:
    assert process.stdout.readline() == b"up\\n"
Place(int(sys.argv[2]), frozenset(json.loads(sys.argv[3]))).move()

def found(pid):
    return {thread.id == pid: sorted(os.sched_getaffinity(thread.id)) for thread in psutil.Process(pid).threads()}

print(json.dumps([list(found(pid).items()) for pid in (os.getpid(), *(process.pid for process in processes))]))
for process in processes:
    process.kill()
"""


def test_every_thread_moves_and_a_schedulers_first_to_its_own_processor() -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    assert others, "this test needs two processors"
    command = [sys.executable, "-c", MOVED, TITLED, str(first), json.dumps(others)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    this, scheduler, other = (dict(items) for items in json.loads(done.stdout))
    assert scheduler == {True: [first], False: others}
    assert other == {True: others, False: others}
    assert this[True] == others
