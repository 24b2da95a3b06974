# SPDX-License-Identifier: Apache-2.0
"""What a second run says of a first: spreads, starts of the servers, ours over stock, and whether a row comes back."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from benchmarks import compare, prefix_hit, ratios
from benchmarks.common import median_interval, spread, spread_over_starts, stated


def test_a_row_comes_back_within_its_spread() -> None:
    """Not one that was measured once, nor one that the other run lacks."""

    def row(arm: str, ms: float, step: float, rounds: int = 3) -> dict[str, object]:
        spread = {"ttft_ms": 0.1, "step_ms": 0.0}
        return {"arm": arm, "ttft_ms": ms, "step_ms": step, "spread": spread, "raw": [{}] * rounds}

    kept = {"rows": [row("vattn", 100, 7), row("once", 1, 1, rounds=1), row("gone", 1, 1)]}
    again = {"key": ["arm"], "rows": [row("vattn", 91, 7.1), row("once", 9, 9)]}
    found = {pair.figure: pair.comes_back for pair in compare.pairs(kept, again)}
    assert found == {"ttft_ms": True, "step_ms": False}
    assert [pair.figure for pair in compare.pairs(kept, again, ["step_ms"])] == ["step_ms"]
    arms = {
        "case": 1,
        "ms": {"rows": 2.0, "paged": 3.0},
        "spread": {"rows": 0.02, "paged": 0.02},
        "raw": {"rows": [1, 2]},
    }
    found = {
        pair.figure: pair.comes_back
        for pair in compare.pairs(
            {"rows": [arms, {"case": 2, "hit_rate": 0.5}]},
            {"key": ["case"], "rows": [{**arms, "ms": {"rows": 2.03, "paged": 3.1}}, {"case": 2, "hit_rate": 0.9}]},
        )
    }
    assert found == {"rows": True, "paged": False}
    assert [stated(share) for share in (0.0, 0.0012, 0.01, 0.0101, 0.07)] == [0.01, 0.01, 0.01, 0.02, 0.07]


def test_a_start_of_the_servers_is_told_from_the_others() -> None:
    def row(value: int, starts: dict[int, list[float]]) -> dict[str, object]:
        raw = [{"ttft_ms": ms, "ttfts_s": [], "start": start} for start, values in starts.items() for ms in values]
        return prefix_hit.row_of("vattn", "prefix", value, prefix_hit.Load(), raw)

    rows = [row(1, {1: [4.0, 6.0], 2: [9.0], 3: [5.0]}), row(2, {1: [1.0]}), row(3, {2: [1.0]})]
    others, this = compare.without_start({"key": ["value"], "rows": rows}, 2)
    found = [(row["value"], row["ttft_ms"], row["spread"]["ttft_ms"]) for row in others["rows"]]
    assert found == [(1, 5, 0.4), (2, 1, 0)]
    assert [(row["value"], row["ttft_ms"]) for row in this["rows"]] == [(1, 9), (3, 1)]


def test_the_spread_of_a_few_starts_foretells_the_next() -> None:
    """Three starts of three rounds: a fourth one's median is within in about 95 % of draws, less often in the range."""
    draw, starts = random.Random(0), [1, 1, 1, 2, 2, 2, 3, 3, 3]
    within = {"range": 0, "stated": 0}
    for _ in range(1000):
        machines = [draw.gauss(100, 3) for _ in range(4)]
        known = [draw.gauss(machines[start - 1], 1) for start in starts]
        again = statistics.median(draw.gauss(machines[3], 1) for _ in range(3))
        off = abs(again / statistics.median(known) - 1)
        within["range"] += off <= spread(known)
        within["stated"] += off <= spread_over_starts(known, starts)
    assert within["range"] < 900 and 935 <= within["stated"] <= 975
    assert spread_over_starts([1.0, 2.0, 3.0, 9.0], [1, 1, 2, 2]) == spread([1.0, 2.0, 3.0, 9.0])
    ahead = 4.303 * 1.0 * math.sqrt(4 / 3) / 11
    assert spread_over_starts([10.0, 11.0, 12.0], [1, 2, 3]) == pytest.approx(ahead)


def test_ours_over_the_better_stock_arm_by_rounds_that_took_turns() -> None:
    def row(arm: str, value: int, steps: dict[int, list[float]]) -> dict[str, object]:
        raw = [
            {"start": start, "decode_step_ms": ms, "tokens_per_s": 1 / ms, "cold_ttft_ms": 1.0, "ttft_ms": 1.0}
            for start, values in steps.items()
            for ms in values
        ]
        figures = {figure: statistics.median(one[figure] for one in raw) for figure in ratios.FIGURES}
        return {"arm": arm, "value": value, **figures, "raw": raw}

    rows = [
        row("vattn", 1, {1: [4.0, 5.0], 2: [6.0]}),
        row("stock_page1", 1, {1: [20.0, 20.0], 2: [20.0]}),
        row("stock_page128", 1, {1: [8.0], 2: [15.0]}),  # the better one, in two of the rounds
        row("vattn", 2, {1: [1.0]}),  # no stock arm has it
    ]
    [found] = ratios.against_stock(rows, ("arm", "value"))
    assert (found["arm"], found["value"]) == ("vattn", 1)
    assert found["raw"]["decode_step_ms"] == [0.5, 0.4] and found["decode_step_ms"] == pytest.approx(0.45)
    assert found["raw"]["tokens_per_s"] == pytest.approx([2.0, 2.5])
    assert found["spread"]["decode_step_ms"] == pytest.approx(0.1 / 0.45)
    assert found["over"]["decode_step_ms"] == "stock_page128"
    rows[2] = row("stock_page128", 1, {1: [40.0, 40.0]})  # now page 1 is the better one
    [again] = ratios.against_stock(rows, ("arm", "value"))
    assert again["raw"]["decode_step_ms"] == pytest.approx([0.2, 0.25, 0.3])
    [again] = ratios.against_stock(rows, ("arm", "value"), like=[found])  # but the first was over page 128
    assert again["raw"]["decode_step_ms"] == pytest.approx([0.1, 0.125])
    three = row("vattn", 1, {1: [4.0], 2: [5.0], 3: [6.0]}), row("stock_page1", 1, {1: [8.0], 2: [8.0], 3: [8.0]})
    [found] = ratios.against_stock(three, ("arm", "value"))
    assert found["spread"]["decode_step_ms"] == pytest.approx(4.303 * 0.125 * math.sqrt(4 / 3) / 0.625)


def test_where_the_median_lies() -> None:
    """With a certainty of 95 %: of 300 draws of 40 values, about 15 intervals miss it."""
    draw = random.Random(0)
    samples = [[draw.expovariate(1) for _ in range(40)] for _ in range(300)]
    intervals = [median_interval(sample) for sample in samples]
    missed = sum(not low <= math.log(2) <= high for low, high in intervals)
    assert 5 <= missed <= 25
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_each_start_is_held_against_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def came_back(third: float, *more: str) -> tuple[bool, list[str]]:
        steps = {
            "vattn": {1: [4.0, 5.0], 2: [4.0, 5.0], 3: [third]},
            "stock_page1": {1: [8.0] * 2, 2: [8.0] * 2, 3: [8.0]},
        }
        rows = []
        for arm, starts in steps.items():
            raw = [
                dict.fromkeys(ratios.FIGURES, ms) | {"start": start} for start, each in starts.items() for ms in each
            ]
            rows.append(prefix_hit.row_of(arm, "prefix", 512, prefix_hit.Load(), raw))
        path = tmp_path / "result.json"
        path.write_text(json.dumps({"key": ["arm", "sweep", "value"], "rows": rows}))
        monkeypatch.setattr("sys.argv", ["compare", str(path), "--figures", "ttft_ms", *more])
        with pytest.raises(SystemExit) as end:
            compare.main()
        return not end.value.code, capsys.readouterr().out.splitlines()

    def counted(start: int, back: int, of: int) -> str:
        return f"start {start}: {back} of {of} figures come back within their spread"

    assert came_back(4.5) == (True, [counted(start, 2, 2) for start in (1, 2, 3)])
    assert came_back(4.5, "--ratios") == (True, [counted(start, 1, 1) for start in (1, 2, 3)])
    whole, lines = came_back(6.0, "--ratios")
    assert not whole and lines[-2:] == ["vattn prefix 512: ttft_ms 0.5625 +- 23%, again 0.75", counted(3, 0, 1)]
