# SPDX-License-Identifier: Apache-2.0
"""Does a second run give the first one's rows back within their stated spread?

    python -m benchmarks.compare benchmarks/results/h200/prefix_hit.json build/bench/prefix_hit.json
    python -m benchmarks.compare kept.json again.json --figures ttft_ms tokens_per_s
    python -m benchmarks.compare kept.json again.json --ratios
    python -m benchmarks.compare benchmarks/results/h200/prefix_hit.json --ratios      each of its starts by the others

For results whose rows state a spread: the tables of kernels, virtual-memory calls, the tree, first tokens, serving and
prefix hits. A figure does if it is no further from the first run's than that one's spread (a share of its median, as
the tables state it; where figures are arms' times, each arm's own); one that was measured once has none to be within.
Times belong to a machine, even among machines of one kind: for prefix hits ``--ratios`` compares ours over stock
instead (`ratios.py`). Of a result of prefix hits from several starts of the servers (`quick --add`) each start can be
held against the others. Exit code 1 if a figure does not come back.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import start_of, stated
from benchmarks.prefix_hit import Load, last_start, row_of
from benchmarks.ratios import FIGURES, as_ratios

Result = dict[str, Any]


class Pair(NamedTuple):
    """One figure of a row in both runs."""

    row: str
    figure: str
    kept: float
    again: float
    spread: float

    @property
    def comes_back(self) -> bool:
        return abs(self.again - self.kept) <= stated(self.spread) * abs(self.kept)


def pairs(kept: Result, again: Result, figures: Sequence[str] | None = None) -> Iterator[Pair]:
    """Every figure that has a spread in the first run and was measured in both; ``figures``: these alone."""
    key = again["key"]
    found = {tuple(row.get(field) for field in key): row for row in kept["rows"]}
    for row in again["rows"]:
        name = tuple(row.get(field) for field in key)
        first = found.get(name)
        if first is None or measured(first) < 2:
            continue
        before, now = values(first), values(row)
        for figure, spread in first.get("spread", {}).items():
            if figure in before and figure in now and (figures is None or figure in figures):
                yield Pair(" ".join(map(str, name)), figure, before[figure], now[figure], spread)


def without_start(result: Result, number: int) -> tuple[Result, Result]:
    """The result without the rounds of this start of the servers, and these alone."""

    def of(this: bool) -> Result:
        rows = []
        for row in result["rows"]:
            if raw := [one for one in row["raw"] if (start_of(one) == number) == this]:
                rows.append(row_of(row["arm"], row["sweep"], row["value"], Load(**row["load"]), raw))
        return {**result, "rows": rows}

    return of(this=False), of(this=True)


def values(row: dict[str, Any]) -> dict[str, float]:
    """A row's figures: fields of its own, or those of its arms under ``ms`` or ``us``."""
    arms: dict[str, float] = next((row[unit] for unit in ("ms", "us") if isinstance(row.get(unit), dict)), {})
    return {**arms, **row}


def measured(row: dict[str, Any]) -> int:
    """How many times: ``raw`` has an entry a round, or for each kind of measurement as many; 0: nothing is kept."""
    raw = row.get("raw", [])
    return len(raw) if isinstance(raw, list) else min(map(len, raw.values()))


def report(name: str, found: Sequence[Pair]) -> None:
    """Print those that do not come back, and how many do."""
    for pair in found:
        if not pair.comes_back:
            print(f"{pair.row}: {pair.figure} {pair.kept:.4g} +- {stated(pair.spread):.0%}, again {pair.again:.4g}")
    print(f"{name}: {sum(pair.comes_back for pair in found)} of {len(found)} figures come back within their spread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="the result that states the spread")
    parser.add_argument("again", type=Path, nargs="?", help="the second run's; default: each start by the others")
    parser.add_argument("--ratios", action="store_true", help="of ours over the better stock arm's, round by round")
    parser.add_argument("--figures", nargs="+", help="default: all that have a spread")
    args = parser.parse_args()
    kept = json.loads(args.kept.read_text())
    again = json.loads(args.again.read_text()) if args.again else kept
    if "key" not in again:
        sys.exit(
            f"{args.again or args.kept} does not say which fields name a row (`key`): measure it with this version"
        )
    if not all(FIGURES.keys() <= row.keys() for row in (*kept["rows"], *again["rows"])):
        if args.ratios:
            sys.exit("--ratios: for results of prefix_hit or quick; leave it out")
        if args.again is None:
            sys.exit("without a second file: for results of prefix_hit or quick; name the second run's")
    runs = {"in all": (kept, again)}
    if args.again is None:
        runs = {f"start {n}": without_start(kept, n) for n in range(1, last_start(kept["rows"]) + 1)}
    found: list[Pair] = []
    for name, (before, after) in runs.items():
        if args.ratios:
            before = as_ratios(before, again["key"])
            after = as_ratios(after, again["key"], like=before["rows"])
        found += (these := list(pairs(before, after, args.figures)))
        report(name, these)
    if not found:
        sys.exit("no figure to compare: the files have no row in common that was measured more than once")
    sys.exit(not all(pair.comes_back for pair in found))


if __name__ == "__main__":
    main()
