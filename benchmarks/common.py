# SPDX-License-Identifier: Apache-2.0
"""What every benchmark here shares: medians and spreads, the machine, and a result file that grows.

A result file is JSON: machine, versions, date, command and ``rows``. It is written after every row, so a run that is
stopped keeps what it has; with ``resume`` a run does only the rows that the file lacks. A row keeps its raw
measurements under ``raw``.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
Item = TypeVar("Item")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with a certainty of 95 %, whatever the distribution: by ranks, which are binomial."""
    rank = max(1, math.floor(len(values) / 2 - 0.98 * math.sqrt(len(values))))
    ranked = sorted(values)
    return ranked[rank - 1], ranked[-rank]


def spread(values: Sequence[float]) -> float:
    """(max - min) / median, the measure that every table here states."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def start_of(measured: Row) -> int:
    """At which start of its server this was measured, where a result has more than one; else 1."""
    start: int = measured.get("start", 1)
    return start


STUDENT_95 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # t, two-sided 95 %, of 3, 4, .. 10 values


def spread_over_starts(values: Sequence[float], starts: Sequence[int]) -> float:
    """`spread`, or what another start of the servers may be off by where that is more, as a share of the median.

    ``starts`` says of each value at which start it was measured. What rounds of one start have in common (the machine,
    where memory came to lie) no round tells, and the range of few starts often misses the next. From three starts on
    the least is half the prediction interval of a further start's median: with 95 %, by Student's t.
    """
    by_start = [[one for one, of in zip(values, starts, strict=True) if of == start] for start in set(starts)]
    count, middle = len(by_start), median(values)
    if count < 3 or not middle:
        return spread(values)
    t = STUDENT_95[min(count - 3, len(STUDENT_95) - 1)]
    ahead = t * statistics.stdev(map(median, by_start)) * math.sqrt(1 + 1 / count)
    return max(spread(values), ahead / middle)


def stated(share: float) -> float:
    """A spread as the tables state it: rounded up to a whole percent, 1 % at least. A few rounds know no finer one."""
    return max(1, math.ceil(share * 100 - 1e-9)) / 100


def quartile_spread(values: Sequence[float]) -> float:
    """(third quartile - first) / median: for many short measurements, where one interruption is the maximum."""
    if len(values) < 4:
        return spread(values)
    first, middle, third = statistics.quantiles(values, n=4)
    return (third - first) / middle if middle else 0.0


def machine(device: str = "cpu") -> dict[str, str]:
    """What the numbers were measured on."""
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]
        return {
            "gpu": properties.name,
            "gpus": str(torch.cuda.device_count()),
            "memory_gib": f"{properties.total_memory / 2**30:.0f}",
            "driver": driver,
        }
    return {"cpu": _cpu_name(), "cores": str(len(os.sched_getaffinity(0))), "kernel": platform.release()}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """The installed versions that matter, without importing more than their metadata."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("sglang", "torch", "sgl-kernel", "sglang-vattn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command(module: str) -> str:
    """The command that gives the running benchmark's numbers again."""
    return shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


class ResultFile:
    """The rows of one benchmark, on disk after each of them.

    Parameters
    ----------
    key
        The fields that tell one row from another: a row replaces an earlier one with the same values.
    resume
        Keep the rows of an existing file, so that :meth:`has` finds them.
    """

    def __init__(
        self, path: Path, module: str, key: Sequence[str], *, device: str = "cpu", resume: bool = False
    ) -> None:
        self.path, self.key = path, tuple(key)
        self.rows: list[Row] = []
        self.head = {
            "machine": machine(device),
            "versions": versions(),
            "date": time.strftime("%Y-%m-%d"),
            "command": command(module),
            "key": self.key,
        }
        if resume and path.exists():
            before = json.loads(path.read_text())
            self.rows = before["rows"]
            if "notes" in before:
                self.head["notes"] = before["notes"]
        path.parent.mkdir(parents=True, exist_ok=True)

    def _name(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(field) for field in self.key)

    def has(self, **fields: Any) -> bool:
        return any(self._name(row) == self._name(fields) for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep the row and write the file, all of it or none."""
        self.rows = [other for other in self.rows if self._name(other) != self._name(row)] + [row]
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")
        unfinished.replace(self.path)


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterable[Item]:
    """A progress bar on a terminal; on a pipe, nothing."""
    from tqdm import tqdm

    bar: Iterable[Item] = tqdm(items, desc=what, total=total, disable=not sys.stderr.isatty(), leave=False)
    return bar


def alternately(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    least: int = 3,
    budget_s: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, the arms taking turns: what disturbs the machine disturbs all of them alike.

    Stops after ``rounds``, or behind the round that ends past ``budget_s`` (but not before ``least``).
    """
    out: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warmup):
            call()
    began = time.perf_counter()
    for done in range(rounds):
        if done >= least and time.perf_counter() - began > budget_s:
            break
        for name, call in calls.items():
            start = clock()
            call()
            out[name].append(clock() - start)
    return out
