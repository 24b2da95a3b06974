# SPDX-License-Identifier: Apache-2.0
"""Ours over stock, round by round: what travels from one machine to another, as times do not.

Another H200, and already another start of the same servers, shifts every arm's times together, by more than its rounds
differ. Rounds that were taken in turns see the same machine, so their ratios are told surer than either time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import Row, median, spread

OURS, STOCK = "vattn", ("stock_page1", "stock_page128")
FIGURES = {"cold_ttft_ms": min, "ttft_ms": min, "decode_step_ms": min, "tokens_per_s": max}  # figure -> which is better


def _by_round(raw: Sequence[Row], figure: str) -> dict[tuple[int, int], float]:
    """(start of the servers, how many rounds since) -> value."""
    rounds: dict[int, int] = defaultdict(int)
    out = {}
    for one in raw:
        start = one.get("start", 1)
        out[start, rounds[start]] = one[figure]
        rounds[start] += 1
    return out


def against_stock(rows: Sequence[Row], key: Sequence[str]) -> Iterator[Row]:
    """For each of our rows: its figures over those of the stock arm that was better at it.

    A row has the fields of ``key`` (``arm`` among them), the median ratio of each of `FIGURES`, its spread and, under
    ``raw``, the ratio of each round that both arms were measured in. Rows that no stock arm shares are left out.
    """
    found = {tuple(row[field] for field in key): row for row in rows}
    for row in rows:
        others = [
            found[name]
            for arm in STOCK
            if (name := tuple(arm if field == "arm" else row[field] for field in key)) in found
        ]
        if row["arm"] != OURS or not others:
            continue
        raw: dict[str, list[float]] = {}
        for figure, better in FIGURES.items():
            stock = better(others, key=lambda other: other[figure])
            ours, theirs = (_by_round(each["raw"], figure) for each in (row, stock))
            raw[figure] = [ours[which] / theirs[which] for which in ours if which in theirs]
        yield {
            **{field: row[field] for field in key},
            **{figure: median(values) for figure, values in raw.items()},
            "spread": {figure: spread(values) for figure, values in raw.items()},
            "raw": raw,
        }


def as_ratios(result: dict[str, Any], key: Sequence[str]) -> dict[str, Any]:
    """A result with these rows instead of its own."""
    return {**result, "rows": list(against_stock(result["rows"], key))}
