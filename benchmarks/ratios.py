# SPDX-License-Identifier: Apache-2.0
"""Ours over stock, round by round: what travels from one machine to another, as times do not.

Another H200, and already another start of the same servers, shifts every arm's times together, by more than its rounds
differ. Rounds that were taken in turns see the same machine, so their ratios are told surer than either time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import Row, median, spread_over_starts, start_of

OURS, STOCK = "vattn", ("stock_page1", "stock_page128")
FIGURES = {"cold_ttft_ms": min, "ttft_ms": min, "decode_step_ms": min, "tokens_per_s": max}  # figure -> which is better


def _by_round(raw: Sequence[Row], figure: str) -> dict[tuple[int, int], float]:
    """(start of the servers, how many rounds since) -> value."""
    rounds: dict[int, int] = defaultdict(int)
    out = {}
    for one in raw:
        start = start_of(one)
        out[start, rounds[start]] = one[figure]
        rounds[start] += 1
    return out


def against_stock(rows: Sequence[Row], key: Sequence[str], like: Sequence[Row] = ()) -> Iterator[Row]:
    """For each of our rows: its figures over those of the stock arm that was better at it.

    A row has the fields of ``key`` (``arm`` among them), the median ratio of each of `FIGURES`, its spread, the stock
    arm under ``over`` and, under ``raw``, the ratio of each round that both arms were measured in. A row that ``like``
    has too is over the same arm as there. Rows that no stock arm shares are left out.
    """

    def name_of(row: Row, **other: str) -> tuple[Any, ...]:
        return tuple((row | other)[field] for field in key)

    found = {name_of(row): row for row in rows}
    chosen = {name_of(row): row["over"] for row in like}
    for row in rows:
        others = {arm: found[name] for arm in STOCK if (name := name_of(row, arm=arm)) in found}
        if row["arm"] != OURS or not others:
            continue
        over = {figure: better(others, key=lambda arm: others[arm][figure]) for figure, better in FIGURES.items()}
        over |= {figure: arm for figure, arm in chosen.get(name_of(row), {}).items() if arm in others}
        raw, spread = dict[str, list[float]](), dict[str, float]()
        for figure, arm in over.items():
            ours, theirs = (_by_round(each["raw"], figure) for each in (row, others[arm]))
            both = [which for which in ours if which in theirs]
            raw[figure] = [ours[which] / theirs[which] for which in both]
            spread[figure] = spread_over_starts(raw[figure], [start for start, _ in both])
        yield {
            **{field: row[field] for field in key},
            **{figure: median(values) for figure, values in raw.items()},
            "spread": spread,
            "over": over,
            "raw": raw,
        }


def as_ratios(result: dict[str, Any], key: Sequence[str], like: Sequence[Row] = ()) -> dict[str, Any]:
    """A result with these rows instead of its own."""
    return {**result, "rows": list(against_stock(result["rows"], key, like))}
