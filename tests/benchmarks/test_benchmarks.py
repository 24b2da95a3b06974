# SPDX-License-Identifier: Apache-2.0
"""Small runs of the benchmarks themselves: they give rows of the right form. Nothing here asserts a speed."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("sglang")

from benchmarks import (
    arms,
    kernels_host,
    loads,
    observe_cost,
    plots,
    prefix_hit,
    quick,
    tree,
    vmm,
)
from benchmarks.table_rows import first_token as first_token_table
from benchmarks.table_rows import kernels_host as kernel_table
from benchmarks.table_rows import scrub_cost as scrub_cost_table
from tests.support.tiny_model import tiny_model


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


def test_loads_change_one_thing_about_the_base() -> None:
    base = prefix_hit.BASE["cuda"]
    for sweep, value, load in prefix_hit.loads("cuda", None, False):
        changed = {name for name in load._fields if getattr(load, name) != getattr(base, name)}
        assert changed <= ({"arrival", "members"} if value == prefix_hit.ONE_BY_ONE else {sweep})
        assert getattr(load, sweep) == value
    assert {sweep for sweep, *_ in prefix_hit.loads("cpu", ["own"], False)} == {"own"}


def test_quick_loads_fit_the_small_pool_and_the_captured_batches() -> None:
    for sweep, value, load in quick.quick_loads("cuda"):
        own_pages = -(-(load.own + load.output) // 128) + 2  # a partial copy before, a page mapped ahead behind
        assert load.prefixes * load.prefix + load.requests * own_pages * 128 <= arms.SMALL_POOL_TOKENS, (sweep, value)
        assert load.requests <= 64
        assert getattr(load, sweep) == value


def test_quick_adds_the_rounds_of_another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_servers(names: list[str], *_: object) -> Iterator[dict[str, object]]:
        yield dict.fromkeys(names)

    seeds: list[int] = []

    def measure(_client: object, _model: Path, load: prefix_hit.Load, seed: int, _scratch: Path) -> dict[str, object]:
        seeds.append(seed)
        figures = ("cold_ttft_ms", "ttft_ms", "decode_step_ms", "tokens_per_s", "hit_share", "most_tokens_used")
        return dict.fromkeys((*figures, *prefix_hit.MOVED), float(len(seeds))) | {"ttfts_s": []}

    monkeypatch.setattr(quick, "all_serving", no_servers)
    monkeypatch.setattr(prefix_hit, "measure", measure)
    for more in ([], ["--add"]):
        arguments = ["--arms", "vattn", "stock_no_hits", "--rounds", "2", "--trace", "none", "--out", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["quick", *arguments, *more])
        quick.main()
    rows = json.loads((tmp_path / "prefix_hit.json").read_text())["rows"]
    starts = {(row["arm"], row["sweep"]): [one["start"] for one in row["raw"]] for row in rows}
    ours = {("vattn", sweep): [1, 1, 2, 2] for sweep in ("prefix", "arrival")}
    assert starts == {**ours, ("stock_no_hits", "prefix"): [1, 2]}
    first, *_ = (row for row in rows if row["arm"] == "vattn")
    assert first["ttft_ms"] == statistics.median(one["ttft_ms"] for one in first["raw"])
    sent = sorted(seed for seed in seeds if seed != 99)
    assert sent == [1000] * 3 + [1001] * 2 + [2000] * 3 + [2001] * 2, "no prompt is sent twice to an arm"


def test_the_prefixes_that_are_sent_first_are_those_of_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bench_serving, given the same seed and home, must find the same prompts."""
    model = tiny_model(tmp_path)
    load = prefix_hit.Load(prefix=40, members=3, prefixes=4, own=5, output=2, zipf=1.2)
    found = loads.prefixes(model, load, 7, tmp_path)
    assert 1 <= len(found) <= 4 and all(len(prefix) == 40 for prefix in found)
    sent: list[list[int]] = []

    def bench_main() -> None:
        from sglang.benchmark.datasets.generated_shared_prefix import GeneratedSharedPrefixDataset

        parser_args = argparse.Namespace(
            gsp_num_groups=4, gsp_prompts_per_group=3, gsp_system_prompt_len=40, gsp_question_len=5, gsp_output_len=2,
            seed=7, tokenize_prompt=True, gsp_group_distribution="zipf", gsp_zipf_alpha=1.2,
        )  # fmt: skip
        tokenizer = loads._bench().get_tokenizer(str(model))
        sent.extend(row.prompt for row in GeneratedSharedPrefixDataset.from_args(parser_args).load(tokenizer))
        (tmp_path / "bench_serving.jsonl").write_text("{}\n")

    monkeypatch.setattr(loads._bench(), "cli_main", bench_main)
    loads.bench_serving("http://x", model, load, 7, tmp_path)
    assert len(sent) == 12
    assert {tuple(prompt[:40]) for prompt in sent} == {tuple(prefix) for prefix in found}


def test_arrivals_become_flags_of_bench_serving() -> None:
    base = prefix_hit.BASE["cpu"]

    def flags(**change: object) -> list[str]:
        return loads.arguments("http://x", Path("m"), base._replace(**change), 1, Path("o"))  # type: ignore[arg-type]

    assert "--request-rate=2.0" in flags(arrival=2.0)
    assert "--max-concurrency=1" in flags(arrival=prefix_hit.ONE_BY_ONE)
    assert not any(flag.startswith(("--request-rate", "--max-concurrency")) for flag in flags())
    assert "--gsp-zipf-alpha=1.5" in flags(zipf=1.5)


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
