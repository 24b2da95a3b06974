# SPDX-License-Identifier: Apache-2.0
"""Small runs of the benchmarks themselves: they give rows of the right form. Nothing here asserts a speed."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("sglang")

from benchmarks import kernels_host, observe_cost, plots, tree, vmm
from benchmarks.table_rows import first_token as first_token_table
from benchmarks.table_rows import kernels_host as kernel_table
from benchmarks.table_rows import scrub_cost as scrub_cost_table


@pytest.mark.parametrize("kind", ["decode", "extend", "cold"])
@pytest.mark.parametrize("heads", [kernels_host.LLAMA, kernels_host.TINY], ids=str)
def test_rows_and_pages_give_what_stock_gives(kind: str, heads: kernels_host.Heads) -> None:
    context = 300
    case = kernels_host.Case(heads, kind, {"decode": 1, "extend": 100, "cold": context}[kind], context)
    memory = kernels_host.Memory(heads, context)
    arms = kernels_host.calls(case, memory)
    expected = arms["stock"]().clone()
    for name in ("rows", "pages"):
        assert (arms[name]() - expected).abs().max() < 1e-5, name
    del arms
    memory.close()


def test_kernel_rows_make_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernels_host.Case(kernels_host.TINY, "decode", 1, 200)
    monkeypatch.setattr(kernels_host, "cases", lambda small: [case])
    args = argparse.Namespace(rounds=4, small=True)
    rows = list(kernels_host.measure(args, lambda **fields: False))
    assert [len(values) for values in rows[0]["raw"].values()] == [4, 4, 4]
    assert len(kernel_table({"rows": rows})) == 2
    assert not list(kernels_host.measure(args, lambda **fields: True))  # resumed


@pytest.mark.parametrize("operation", tree.OPERATIONS)
def test_tree_operations_do_the_same_on_both_trees(operation: str) -> None:
    row = tree.measure(operation, 2000, 2)
    assert row["us"].keys() == {"stock", "vattn"} and all(len(values) == 2 for values in row["raw"].values())


def test_both_trees_find_what_they_were_given() -> None:
    tokens = tree.sequence(0, 2000)
    for kind in (tree.Ours, tree.Theirs):
        cache = kind(10_000)
        cache.insert(tokens)()
        assert len(cache.hit(tokens, 1500)) == 1500
        cache.close()


def test_the_virtual_memory_calls_are_counted() -> None:
    rows = {row["case"]: row for row in vmm.calls("cpu", 1 << 16, 2, True)}
    assert rows["map, 64 KiB, 8 a row"]["us_per_page"] > 0
    assert rows["unmap, 64 KiB, 8 a row"]["us_per_call"] > 0


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measures = dict.fromkeys((measure for measure, _ in plots.PANELS), 1.0)
    rows = [
        {"arm": arm, "sweep": "zipf", "value": value, **measures, "raw": [measures, measures]}
        for arm in ("vattn", "stock_page1")
        for value in (None, 1.5)
    ]
    paths = plots.draw(rows, "zipf", "a title", tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg"] and all(path.stat().st_size for path in paths)


def test_a_watcher_looks_by_the_time_that_is_watched() -> None:
    """Not once more for each stretch, of which there are many short ones."""
    asked: list[str] = []
    client = cast(Any, SimpleNamespace(text=asked.append))
    watcher = observe_cost.Watcher(client, {"/vattn/state": 60.0, "/metrics": 300.0})
    for _ in range(5):
        with watcher.watching():
            time.sleep(0.01)
    assert asked == ["/vattn/state", "/metrics"]
    watcher.watched_s += 60
    with watcher.watching():
        time.sleep(0.01)
    assert asked[2:] == ["/vattn/state"]


def test_a_watcher_who_asks_for_nothing_takes_no_time() -> None:
    """He once spun from the second second on, and slowed down the side that he belonged to."""
    watcher = observe_cost.Watcher(cast(Any, None), {})
    watcher.watched_s = 10.0
    began = time.process_time()
    with watcher.watching():
        time.sleep(0.3)
    assert time.process_time() - began < 0.1


def test_a_round_adds_up_its_turns() -> None:
    load = observe_cost.LOADS["8b"]._replace(requests=10)
    bursts = [observe_cost.Burst(3.0, 0.25), observe_cost.Burst(5.0, 0.75)]
    turns = [observe_cost.Turn(bursts[0], 0.5), observe_cost.Turn(bursts[1], 1.5)]
    figures = {"requests_per_s": 2.5, "decode_step_ms": 500.0, "processor_ms_per_request": 100.0}
    assert observe_cost.figures(turns, load) == figures
    turns = [turn._replace(burst=observe_cost.Burst(turn.burst.seconds)) for turn in turns]
    del figures["decode_step_ms"]
    assert observe_cost.figures(turns, load) == figures


def test_a_decode_step_is_told_by_the_tokens_that_come_late() -> None:
    """While others of the burst are still prefilled, a step takes longer."""
    came = [(0.5 * count if count < 10 else 5.0 + 0.01 * (count - 10), count) for count in range(1, 41)]
    assert observe_cost.step_s(came) == pytest.approx(0.01)
    by_threes = [(0.01 * count, count) for count in (1, 4, 7, 10, 13, 16)]
    assert observe_cost.step_s(by_threes) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="came at once"):
        observe_cost.step_s([(1.0, 1), (2.0, 8)])


@pytest.mark.parametrize(("streamed", "lengths"), [(False, (5, 5, 1)), (True, (5, 1)), (True, (1, 5))])
def test_an_answer_that_was_cut_short_is_no_fast_one(streamed: bool, lengths: tuple[int, ...]) -> None:
    """The last length is the streamed request's, where there is one."""
    answers = [SimpleNamespace(output=(0,) * length) for length in lengths]
    client = SimpleNamespace(
        together=lambda prompts, _: answers[: len(prompts)], stream=lambda prompt, _: iter(answers[-1:])
    )
    load = observe_cost.LOADS["tiny"]._replace(requests=len(lengths), output=5, streamed=streamed)
    with pytest.raises(AssertionError, match="not 5 tokens for each"):
        observe_cost.burst(cast(Any, client), [[1]] * len(lengths), load)


def test_scrubbing_is_compared_with_the_same_without() -> None:
    def row(arm: str, ms: float, pages: int) -> dict[str, object]:
        spread = {"one_8k_ms": 0.1, "sixteen_512_ms": 0.2}
        return {"arm": arm, "one_8k_ms": ms, "sixteen_512_ms": 2 * ms, "pages_scrubbed": pages, "spread": spread}

    table = scrub_cost_table({"rows": [row("vattn", 200, 0), row("vattn_scrub", 201, 1024)]})
    assert table[-1] == ["`--vattn-scrub`", "201 (10%)", "1.0050", "402 (20%)", "1.0050", "1,024"]


def test_first_tokens_are_compared_with_the_better_of_stock_in_each_round() -> None:
    def row(arm: str, burst: list[float], lone: list[float]) -> dict[str, Any]:
        medians = {"burst_ms": statistics.median(burst), "lone_ms": statistics.median(lone)}
        return {
            "arm": arm,
            "rounds": 3,
            **medians,
            "spread": {"burst_ms": 0.1, "lone_ms": 0.2},
            "raw": {"burst": burst, "lone": lone},
        }

    rows = [
        row("stock_page1", [200, 200, 200], [10, 10, 20, 20, 90, 10]),
        row("stock_page128", [100, 200, 100], [90] * 6),
        row("vattn", [101, 198, 104], [9, 9, 24, 24, 45, 5]),
    ]
    table = first_token_table({"rows": rows})
    assert table[-1] == ["vattn", "104 (10%)", "1.010 (0.990 to 1.040)", "16.5 (20%)", "0.900 (0.500 to 1.200)"]
    assert table[1][2::2] == ["", ""]
    alone = first_token_table({"rows": [row("vattn_rows", [1] * 3, [1] * 6), rows[-1]]})
    assert alone[-1][2::2] == ["", ""]
