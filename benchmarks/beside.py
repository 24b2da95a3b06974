# SPDX-License-Identifier: Apache-2.0
"""Engines side by side on one GPU, each in a process of its own, that are asked in turns.

A lone request is bound by the processor, which on a rented machine has faster and slower times: one arm after the
other, as `serve_ab.py` measures, tells 2 % from nothing only by luck. Engines on shares of the processors that changed
with each round had hits of 12 ms in one round and of 19 in the next, each arm in others. So here all engines run on the
same few processors, others in each round, and those that are not asked sleep.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.arms import BESIDE_OTHERS
from benchmarks.common import Row, median, progress, quartile_spread
from benchmarks.serve_ab import Arm
from tests.support.server import SCHEDULER

# Made once with the arm whose engine is up; then called for each order, and says how many seconds it took.
Session = Callable[[Arm], Callable[[Any], float]]
SLEEPING = {"sleep_on_idle": True}  # else a scheduler that has nothing to do spins


class Place(NamedTuple):
    """Processors: one for the main thread of an engine's scheduler, which bounds a hit, and others for all the rest."""

    scheduler: int
    others: frozenset[int]

    def move(self) -> None:
        """Every thread that this process and those that it started have now; what these start begins where they are."""
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                scheduler = SCHEDULER in " ".join(process.cmdline())
                for thread in process.threads():
                    alone = scheduler and thread.id == process.pid
                    with suppress(ProcessLookupError):  # it has ended since
                        os.sched_setaffinity(thread.id, {self.scheduler} if alone else self.others)


def places(processors: Sequence[int]) -> list[Place]:
    """The places of a machine, in whole cores, of which neighbours are taken for the two threads, as they often are.

    The other thread of a scheduler's core stays free. A machine of fewer than four processors is one place.
    """
    cores = [tuple(processors[i : i + 2]) for i in range(0, len(processors) - 1, 2)]
    if len(cores) < 2:
        return [Place(processors[0], frozenset(processors))]
    return [Place(core[0], frozenset(cores[(i + 1) % len(cores)])) for i, core in enumerate(cores)]


def serve(orders: Any, session: Session, name: str, model: str, log: str) -> None:
    """An arm's process: the session's seconds for each order, its counters, a move to a place; None ends it."""
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    arm = Arm(name, model, 1, BESIDE_OTHERS | SLEEPING)
    measure = session(arm)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        match order:
            case Place():
                orders.send(order.move())
            case "counters":
                orders.send(arm.counters())
            case _:
                orders.send(measure(order))
    arm.engine.shutdown()


class Engine:
    """The benchmark's side of an arm's process."""

    def __init__(self, session: Session, name: str, model: Path, log: Path) -> None:
        self.name, self.log = name, log
        self.seconds: dict[str, list[float]] = {}
        self.processors: list[int] = []  # the scheduler's, in each round
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, session, name, str(model), str(log)))
        self._process.start()
        theirs.close()

    def ask(self, order: Any) -> Any:
        """What the process answers: seconds that the order took, counters, or nothing for a place."""
        with suppress(BrokenPipeError):  # it is gone: receive() says why
            self._orders.send(order)
        return self.receive()

    def counters(self) -> dict[str, int]:
        return dict(self.ask("counters"))

    def receive(self) -> Any:
        """The next that the process says; RuntimeError with the end of its log if it is gone."""
        try:
            return self._orders.recv()
        except EOFError as error:
            raise RuntimeError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}") from error

    def close(self) -> None:
        if self._process.is_alive():
            self._orders.send(None)
        self._process.join(30)
        self._process.kill()

    def row(self) -> Row:
        """Medians in ms by kind, their quartile spreads, and every measurement in seconds."""
        return {
            "arm": self.name,
            "rounds": len(self.processors),
            "processors": self.processors,
            **{f"{kind}_ms": median(values) * 1e3 for kind, values in self.seconds.items()},
            "spread": {f"{kind}_ms": quartile_spread(values) for kind, values in self.seconds.items()},
            "raw": self.seconds,
        }


@contextmanager
def engines(session: Session, arms: Sequence[str], model: Path, logs: Path) -> Iterator[list[Engine]]:
    """An engine an arm, all started at the same time and ready."""
    with ExitStack() as stack:
        started = []
        for name in arms:
            started.append(Engine(session, name, model, logs / f"{name}.log"))
            stack.callback(started[-1].close)
        for engine in started:
            engine.receive()  # it is ready
        yield started


def in_turns(arms: Sequence[Engine], orders: Mapping[str, Any], *, times: Mapping[str, int], rounds: int) -> None:
    """Each engine is given each order so many times a round; the first round is not kept.

    Which begins changes, and so does the place, the same for all.
    """
    everywhere = places(sorted(os.sched_getaffinity(0)))
    for number in progress(range(rounds + 1), "rounds"):
        begin = number % len(arms)
        place = everywhere[(number + number // len(everywhere)) % len(everywhere)]  # each arm begins in each
        for engine in arms:
            engine.ask(place)
            if number > 0:
                engine.processors.append(place.scheduler)
        for engine in [*arms[begin:], *arms[:begin]]:
            for kind, order in orders.items():
                for _ in range(times.get(kind, 1)):
                    seconds = engine.ask(order)
                    if number > 0:  # the first compiles
                        engine.seconds.setdefault(kind, []).append(seconds)


def by_round(row: Row, other: Row, kind: str) -> list[float]:
    """A kind's time over the other engine's in each round; of several measurements in a round, the medians'."""

    def medians(values: Sequence[float]) -> list[float]:
        each, left = divmod(len(values), row["rounds"])
        assert left == 0, "a round has as many as any other"
        return [median(values[i : i + each]) for i in range(0, len(values), each)]

    return [a / b for a, b in zip(medians(row["raw"][kind]), medians(other["raw"][kind]), strict=True)]
