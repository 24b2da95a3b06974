# SPDX-License-Identifier: Apache-2.0
"""The prefix-hit loads: what they are, what is sent, and what of them a run measures. No server is started here."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("sglang")

from benchmarks import arms, loads, prefix_hit, quick
from benchmarks.common import ROOT
from tests.support.tiny_model import tiny_model


class Measured(NamedTuple):
    arm: str
    load: prefix_hit.Load
    seed: int


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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """No server is started; what was to be measured on one."""
    found: list[Measured] = []

    @contextmanager
    def servers(names: list[str], *_: object) -> Iterator[dict[str, str]]:
        yield {name: name for name in names}

    @contextmanager
    def server(_args: argparse.Namespace, name: str, _folder: Path) -> Iterator[tuple[str, Path]]:
        yield name, Path("m")

    def measure(arm: str, _model: Path, load: prefix_hit.Load, seed: int, _scratch: Path) -> dict[str, object]:
        if seed != prefix_hit.WARM_UP_SEED:
            found.append(Measured(arm, load, seed))
        figures = ("cold_ttft_ms", "ttft_ms", "decode_step_ms", "tokens_per_s", "hit_share", "most_tokens_used")
        return dict.fromkeys((*figures, *prefix_hit.MOVED), float(len(found))) | {"ttfts_s": []}

    monkeypatch.setattr(quick, "all_serving", servers)
    monkeypatch.setattr(prefix_hit, "server_of", server)
    monkeypatch.setattr(prefix_hit, "measure", measure)
    return found


def rows_of(module: ModuleType, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the result has once the command was run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [module.__name__, *arguments])
        module.main()
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_quick_adds_the_rounds_of_another_start(tmp_path: Path, measured: list[Measured]) -> None:
    command = ["--arms", "vattn", "stock_no_hits", "--rounds", "2", "--trace", "none", "--out", str(tmp_path)]
    for more in ([], ["--add"]):
        rows = rows_of(quick, tmp_path / "prefix_hit.json", *command, *more)
    starts = {(row["arm"], row["sweep"]): [one["start"] for one in row["raw"]] for row in rows}
    ours = {("vattn", sweep): [1, 1, 2, 2] for sweep in ("prefix", "arrival")}
    assert starts == {**ours, ("stock_no_hits", "prefix"): [1, 2]}
    first, *_ = (row for row in rows if row["arm"] == "vattn")
    assert first["ttft_ms"] == statistics.median(one["ttft_ms"] for one in first["raw"])
    sent = sorted(one.seed for one in measured)
    assert sent == [1000] * 3 + [1001] * 2 + [2000] * 3 + [2001] * 2, "no prompt is sent twice to an arm"


def test_the_base_load_is_measured_once_for_all_sweeps(tmp_path: Path, measured: list[Measured]) -> None:
    out = tmp_path / "out.json"
    rows = rows_of(prefix_hit, out, "--arms", "vattn", "stock_page1", "--rounds", "2", "--out", str(out))
    assert [(row["arm"], row["sweep"], row["value"]) for row in rows] == [
        (arm, sweep, value)
        for arm in ("vattn", "stock_page1")
        for sweep, values in prefix_hit.SWEEPS["cpu"].items()
        for value in values
    ]
    assert len(measured) == len(set(measured)), "no load is measured twice with the same prompts"
    base = prefix_hit.BASE["cpu"]
    for arm in ("vattn", "stock_page1"):
        assert [one.seed for one in measured if one.arm == arm and one.load == base] == [1, 2]
        of_base = [row["raw"] for row in rows if row["arm"] == arm and row["load"] == base._asdict()]
        assert len(of_base) == len(prefix_hit.SWEEPS["cpu"]) and all(raw == of_base[0] for raw in of_base)


def test_a_run_that_its_clock_ends_fails_and_another_does_the_rest(
    tmp_path: Path, measured: list[Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    command = ["--arms", "vattn", "--sweeps", "prefix", "members", "--rounds", "2", "--resume", "--out", str(out)]
    # Each round takes a second of this clock: the second of the second load does not begin.
    monkeypatch.setattr(prefix_hit, "time", SimpleNamespace(monotonic=lambda: float(len(measured))))
    with pytest.raises(SystemExit) as ended:
        rows_of(prefix_hit, out, *command, "--seconds", "3")
    assert ended.value.code == "5 rows are not measured in full after 3 s: --resume goes on with them"
    kept = json.loads(out.read_text())["rows"]
    base_is_in_both = [("prefix", 512, 2), ("prefix", 1024, 1), ("members", 6, 1)]
    assert [(row["sweep"], row["value"], len(row["raw"])) for row in kept] == base_is_in_both

    rows = rows_of(prefix_hit, out, *command)
    assert len(rows) == 6 and all(len(row["raw"]) == 2 for row in rows)
    assert len(measured) == len(set(measured)) == 2 * 5
    second = next(row for row in rows if row["value"] == 1024)
    assert [one["start"] for one in second["raw"]] == [1, 2]
    assert second["raw"][0] == kept[1]["raw"][0], "what was measured before is kept"

    monkeypatch.setattr(prefix_hit, "server_of", None)  # nothing is left, so no server starts
    assert rows_of(prefix_hit, out, *command) == rows


def test_the_parts_of_bench_gpu_measure_every_sweep_on_every_arm() -> None:
    made = subprocess.run(["make", "-n", "bench-gpu"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = [line for line in made.splitlines() if "benchmarks.prefix_hit" in line]
    assert all(line.startswith("timeout 540 ") and " --resume " in line for line in parts)
    found = []
    for line in parts:
        (arm,) = values_of("arms", line)
        found += [(arm, sweep) for sweep in values_of("sweeps", line)]
    assert sorted(found) == sorted((arm, sweep) for arm in arms.ARMS for sweep in prefix_hit.SWEEPS["cuda"])


def values_of(flag: str, command: str) -> list[str]:
    """Of ``--flag value value --other ..``."""
    return command.split(f" --{flag} ")[1].split(" --")[0].split()


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
