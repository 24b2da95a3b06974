# SPDX-License-Identifier: Apache-2.0
"""What `observe_cost` leaves out is left out, and comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from sglang.srt.observability import func_timer, metrics_collector

from benchmarks.switched_server import Switch, ours, sglangs
from sglang_vattn.observe.observer import Observer


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
