# SPDX-License-Identifier: Apache-2.0
"""What `observe_cost` leaves out is left out, and comes back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sglang.srt.observability import func_timer, metrics_collector

from benchmarks.common import ROOT
from benchmarks.observe_cost import LOADS, PAIRS, VOCABULARY, Bursts, burst, looking_s, server, switch
from benchmarks.switched_server import Switch, ours, sglangs
from sglang_vattn.observe.observer import Observer
from tests.support.checks import until
from tests.support.client import Client


def test_our_hooks_do_nothing_while_it_is_off() -> None:
    before = (Observer.log_part, Observer.export)
    nobody = cast(Any, None)  # a method that looks at it would raise
    switch = Switch(ours)
    for _ in range(2):
        switch.set(off=True)
        switch.set(off=True)
        assert Observer.log_part(nobody) == ""
        Observer.export(nobody)
        switch.set(off=False)
        assert (Observer.log_part, Observer.export) == before
        with pytest.raises(AttributeError):
            Observer.export(nobody)


def test_sglangs_metrics_do_nothing_while_they_are_off() -> None:
    reporter = SimpleNamespace(
        enable_metrics=True,
        current_scheduler_metrics_enabled=True,
        scheduler_stage_metrics=SimpleNamespace(enabled=True),
    )
    tokenizer_manager = SimpleNamespace(enable_metrics=True)
    collectors: list[Any] = [metrics_collector.SchedulerMetricsCollector, metrics_collector.TokenizerMetricsCollector]
    calls = [
        (collectors[0], "log_stats"),
        (collectors[0], "observe_queue_time"),
        (collectors[1], "observe_one_finished_request"),
    ]
    before = [getattr(cls, name) for cls, name in calls]
    switch = Switch(lambda: sglangs([reporter, tokenizer_manager]))
    switch.set(off=True)
    try:
        assert all(getattr(cls, name)(None, None) is None for cls, name in calls)
        assert not (reporter.enable_metrics or reporter.current_scheduler_metrics_enabled)
        assert not (reporter.scheduler_stage_metrics.enabled or tokenizer_manager.enable_metrics)
    finally:
        switch.set(off=False)
    assert [getattr(cls, name) for cls, name in calls] == before
    assert reporter.enable_metrics and reporter.scheduler_stage_metrics.enabled and tokenizer_manager.enable_metrics
    assert func_timer.enable_metrics is False  # as it was


class Counted(NamedTuple):
    """What a server has counted so far: in its HTTP process, in its scheduler, and there the time of our metrics."""

    requests: float
    tokens: float
    looking_s: float


def counted(client: Client) -> Counted:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(client.text("/metrics")):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return Counted(sums["sglang:num_requests_total"], sums["sglang:realtime_tokens_total"], looking_s(client)[0])


def test_a_server_keeps_the_path_that_modules_are_found_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's may be among them."""
    folder = tmp_path / "site"
    (folder / "somewhere").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    environment = server(PAIRS["all"], "tiny", tmp_path, tmp_path / "off", 600)._env
    find = "import somewhere, benchmarks; print(benchmarks.__path__[0])"
    found = subprocess.run([sys.executable, "-c", find], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(ROOT / "benchmarks"), found.stderr


def test_each_process_of_a_server_follows_the_switch(tmp_path: Path) -> None:
    """If one did not, on and off would be the same, and looking would seem to cost nothing."""
    path, load = tmp_path / "off", LOADS["tiny"]._replace(output=32, streamed=True)
    bursts = Bursts(load, VOCABULARY["tiny"])
    with server(PAIRS["all"], "tiny", tmp_path, path, 600) as client:
        burst(client, bursts.prompts(), load)
        switch(path, off=True)
        before = counted(client)
        burst(client, bursts.prompts(), load)
        time.sleep(1)
        assert counted(client) == before
        switch(path, off=False)
        burst(client, bursts.prompts(), load)

        def counts_again() -> bool:
            now = counted(client)
            more = now.tokens > before.tokens and now.looking_s > before.looking_s
            return more and now.requests == before.requests + load.requests

        until(counts_again, "each process counts again", every_s=0.2)
