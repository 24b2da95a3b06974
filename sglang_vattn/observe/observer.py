# SPDX-License-Identifier: Apache-2.0
"""The observer in the scheduler's process: the facts, their recent history, and the hooks that read them."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from typing import Any, ClassVar

from sglang_vattn import reporting
from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.observe import STATE_RID
from sglang_vattn.observe.metrics import Metrics
from sglang_vattn.observe.state import check, full_state, pack_pages
from sglang_vattn.observe.tree_view import TreeView
from sglang_vattn.request_pages import RequestPages

# What /server_info tells of every tensor-parallel rank: decisions, which must be equal, and what each did for itself.
OF_EVERY_RANK = (
    *("num_pages", "free", "private", "evictable", "protected", "hit_tokens", "aliased_tokens", "copied_tokens"),
    *("evicted_pages", "batches_rows", "batches_pages", "batches_shared", "pages_mapped", "unmap_calls", "errors"),
)
CHECK = os.environ.get("VATTN_TEST_INTEGRITY") == "1"  # /vattn/state then says what is wrong in the core
RENEW_S = 1.0  # SGLang reports at every prefill; ours costs O(requests), so a burst shares one look
SAMPLE_INTERVAL_S = 1.0
SAMPLES = 300
# Facts that the graphs draw, and ``time_s`` (the scheduler's monotonic clock).
SAMPLED = (
    *("free", "private", "evictable", "protected", "requests", "mappings", "queued_jobs"),
    *("aliased_tokens", "copied_tokens", "pages_mapped", "pages_unmapped"),
    *("batches_rows", "batches_pages", "batches_shared", "tokens_saved"),
)


class SharedPages:
    """How many running requests hold each page by alias.

    Brought up to date when it is read: O(shared pages) once for a request that came or went since, so it costs
    nothing in a step.
    """

    def __init__(self) -> None:
        self.holders: Counter[int] = Counter()
        self._known: dict[RequestPages, list[int]] = {}
        self._packed: dict[RequestPages, str] = {}

    def update(self, allocator: VattnAllocator) -> None:
        running = set(allocator.requests.values())
        for request in self._known.keys() - running:
            self.holders.subtract(self._known.pop(request))
            self._packed.pop(request, None)
        for request in running - self._known.keys():
            if request.shared:
                self._known[request] = request.pages[: request.shared]
                self.holders.update(self._known[request])
        if len(self.holders) > 2 * allocator.pages.num_pages:  # subtract() leaves zeros behind
            self.holders = +self.holders

    def packed(self, request: RequestPages) -> str:
        """The request's shared pages for :mod:`sglang_vattn.observe.state`; made once a request."""
        text = self._packed.get(request)
        if text is None:
            text = self._packed[request] = pack_pages(self._known.get(request, []))
        return text

    def facts(self) -> dict[str, int]:
        counts = [count for count in self.holders.values() if count > 0]
        return {"shared_pages": len(counts), "shared_page_holders": sum(counts)}


class Observer:
    """Reads the pool for all views. Lives on the scheduler's thread and changes nothing."""

    current: ClassVar[Observer | None] = None  # of this process; SGLang's PoolStats knows no scheduler

    def __init__(self, scheduler: Any, allocator: VattnAllocator) -> None:
        self.scheduler = scheduler
        self.allocator = allocator
        self.shared = SharedPages()
        self.tree = TreeView(float("inf")) if CHECK else TreeView()
        self.history: deque[tuple[float, ...]] = deque(maxlen=SAMPLES)
        self.metrics: Metrics | None = None
        self.observe_ns = self.state_ns = 0  # processor time that looking costs the scheduler
        self._recent: tuple[float, dict[str, int]] = (0.0, {})
        self._last_log = (time.monotonic(), 0)
        self._exported_s = 0.0
        collector = scheduler.metrics_reporter.metrics_collector
        if scheduler.metrics_reporter.current_scheduler_metrics_enabled and collector is not None:
            self.metrics = Metrics(collector.labels)
            self.metrics.export(self.facts())

    def facts(self) -> dict[str, int]:
        """The pool's state as plain integers: what all views show. O(requests)."""
        allocator = self.allocator
        self.shared.update(allocator)
        rows_ready = sum(map(allocator.rows.ready, allocator.requests.values()))
        lengths = self.lengths()
        size = allocator.page_size
        waste = sum(
            len(request.pages) * size - lengths[slot] for slot, request in allocator.requests.items() if slot in lengths
        )
        facts = {
            **reporting.facts(allocator),
            **self.shared.facts(),
            "rows_ready": rows_ready,
            "waste_tokens": waste,
            "observe_ns": self.observe_ns,
            "state_ns": self.state_ns,
        }
        self._recent = (time.monotonic(), facts)
        self._sample(facts)
        return facts

    def _recent_facts(self) -> dict[str, int]:
        read_s, facts = self._recent
        return facts if time.monotonic() - read_s < RENEW_S else self.facts()

    def lengths(self) -> dict[int, int]:
        """Tokens that each running request has room for, by its ``req_pool_idx``."""
        checker = getattr(self.scheduler, "invariant_checker", None)
        if checker is None:  # SGLang builds it after its metrics
            return {}
        return {req.kv.req_pool_idx: req.kv.kv_allocated_len for req in checker._requests_owning_rows()}

    def state(self) -> dict[str, Any]:
        """Facts, every page, every row, the tree's top, and the history. Milliseconds for a large pool."""
        began = time.thread_time_ns()
        facts = self.show(self.facts())
        history: dict[str, list[float]] = {"time_s": [], **{name: [] for name in SAMPLED}}
        for values, name in zip(zip(*self.history, strict=True), history, strict=False):
            history[name] = list(values)
        details = full_state(self.allocator, self.tree, self.shared.holders, self.shared.packed, self.lengths())
        self.state_ns += time.thread_time_ns() - began
        if CHECK:
            details["problems"] = check(self.allocator, details["states"])
        return {"facts": facts, "history": history, **details}

    def log_part(self) -> str:
        """For SGLang's log line: ``vattn: pages 812/6784, shared 96 x 14.2, rows 64 ready, maps 3/s``."""
        began = time.thread_time_ns()
        facts = self._recent_facts()
        now, maps = time.monotonic(), facts["map_calls"]
        last_s, last_maps = self._last_log
        self._last_log = (now, maps)
        shared, holders = facts["shared_pages"], facts["shared_page_holders"]
        text = (
            f"vattn: pages {facts['num_pages'] - facts['free']}/{facts['num_pages']}, "
            f"shared {shared} x {holders / max(1, shared):.1f}, rows {facts['rows_ready']} ready, "
            f"maps {(maps - last_maps) / max(1e-3, now - last_s):.0f}/s"
        )
        self.observe_ns += time.thread_time_ns() - began
        return text

    def export(self, interval_s: float = RENEW_S) -> None:
        """Bring the metrics up to date, unless that was done within the interval."""
        now = time.monotonic()
        if self.metrics is not None and now - self._exported_s >= interval_s:
            began = time.thread_time_ns()
            self.show(self._recent_facts())
            self.observe_ns += time.thread_time_ns() - began

    def show(self, facts: dict[str, int]) -> dict[str, int]:
        """Put these facts into the metrics, so that no view is ahead of them."""
        if self.metrics is not None:
            self._exported_s = time.monotonic()
            self.metrics.export(facts)
        return facts

    def _sample(self, facts: dict[str, int]) -> None:
        now = time.monotonic()
        if not self.history or now - self.history[-1][0] >= SAMPLE_INTERVAL_S:
            self.history.append((round(now, 2), *(facts[name] for name in SAMPLED)))


# ---------------------------------------------------------------------- hooks


def attach(result: None, scheduler: Any) -> None:
    """After ``Scheduler.init_metrics_reporter``: one observer for this scheduler, if the pool is ours."""
    allocator = scheduler.token_to_kv_pool_allocator
    if isinstance(allocator, VattnAllocator):
        Observer.current = Observer(scheduler, allocator)


def add_log_part(result: list[str], stats: Any) -> None:
    """After ``PoolStats.get_*_usage_msg_parts``: our part of SGLang's periodic log line."""
    if Observer.current is not None:
        result.append(Observer.current.log_part())


def export(result: None, *a: Any, **kw: Any) -> None:
    """After ``SchedulerMetricsCollector.log_stats``, which SGLang calls at a prefill and every 40 decode steps."""
    if Observer.current is not None:
        Observer.current.export()


def export_when_idle(result: None, *a: Any, **kw: Any) -> None:
    """After ``SchedulerMetricsReporter._maybe_log_idle_metrics``: SGLang's idle loop may keep still for 30 s."""
    if Observer.current is not None:
        Observer.current.export()


def internal_state(original: Any, controller: Any, request: Any) -> Any:
    """Around ``SchedulerInternalStateController.get_internal_state``: our part of ``/server_info``, or all we have."""
    observer = Observer.current
    if observer is None:
        return original(controller, request)
    if request.rid == STATE_RID:
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        return GetInternalStateReqOutput(internal_state={"vattn": observer.state()})
    result = original(controller, request)
    facts = observer.show(observer.facts())
    result.internal_state["vattn"] = facts
    ranks = observer.allocator.reading.ranks
    if ranks is not None:  # SGLang asks all ranks, and answers with what the first one says
        result.internal_state["vattn_ranks"] = ranks.gather({name: facts[name] for name in OF_EVERY_RANK})
    return result
