# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the pool, in SGLang's own endpoint and with SGLang's labels.

``METRICS`` is the whole list; ``docs/operations.md`` has the same table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

PREFIX = "sglang:vattn_"


class Metric(NamedTuple):
    """One metric: its series, each the fact that it shows, by the value of ``label`` ("" without one)."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    label: str
    facts: Mapping[str, str]
    scale: float = 1.0

    @property
    def exported(self) -> str:
        """The name in the endpoint; Prometheus ends counters in ``_total``."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


def _same(*facts: str) -> dict[str, str]:
    return {fact: fact for fact in facts}


_PAGE_STATES = {
    **_same("free", "private", "evictable", "protected"),
    "guard": "guard_pages",
    "padding": "padding_pages",
}
_ROW_STATES = {"clean": "rows_clean", "live": "rows_live", "retired": "rows_retired"}

METRICS = (
    Metric("pages", "gauge", "Physical pages by state.", "state", _PAGE_STATES),
    Metric("reserved_pages", "gauge", "Free pages mapped ahead for a running request.", "", {"": "reserved"}),
    Metric("aliases", "gauge", "Pages mapped in rows, beside their place in the home arena.", "", {"": "mappings"}),
    Metric("max_aliases", "gauge", "The driver's budget of aliases; 0: no limit.", "", {"": "max_mappings"}),
    Metric(
        "bytes",
        "gauge",
        "Memory of the pool: physical, addresses reserved, and addresses of rows with memory behind them.",
        "kind",
        {"physical": "physical_bytes", "virtual": "virtual_bytes", "aliased": "aliased_bytes"},
    ),
    Metric("shared_pages", "gauge", "Pages that running requests hold by alias.", "", {"": "shared_pages"}),
    Metric(
        "shared_page_holders",
        "gauge",
        "Aliased pages of all running requests; divided by shared_pages, the mean number of sharers.",
        "",
        {"": "shared_page_holders"},
    ),
    Metric("rows", "gauge", "Rows (virtual ranges) by state.", "state", _ROW_STATES),
    Metric("rows_waiting", "gauge", "Live rows given back behind a forward in flight.", "", {"": "rows_waiting"}),
    Metric("rows_ready", "gauge", "Running requests whose row is mapped in full.", "", {"": "rows_ready"}),
    Metric("queued_rows", "gauge", "Rows with work for the mapping thread.", "", {"": "queued_jobs"}),
    Metric("waste_tokens", "gauge", "Unused room in the last pages of running requests.", "", {"": "waste_tokens"}),
    Metric("cached_tokens", "gauge", "Tokens in the prefix tree.", "", {"": "cached_tokens"}),
    Metric("tree_nodes", "gauge", "Nodes of the prefix tree.", "", {"": "tree_nodes"}),
    Metric(
        "hit_tokens",
        "counter",
        "Prompt tokens found in the cache, by how they were taken over.",
        "kind",
        {"aliased": "aliased_tokens", "copied": "copied_tokens"},
    ),
    Metric(
        "driver_calls",
        "counter",
        "Calls of the driver by the mapping thread.",
        "call",
        {"map": "map_calls", "unmap": "unmap_calls", "set_access": "set_access_calls"},
    ),
    Metric(
        "driver_seconds",
        "counter",
        "Time in those calls; map includes set_access.",
        "call",
        {"map": "map_ns", "unmap": "unmap_ns"},
        1e-9,
    ),
    Metric("mapped_pages", "counter", "Pages mapped into rows.", "", {"": "pages_mapped"}),
    Metric("unmapped_pages", "counter", "Pages unmapped from rows.", "", {"": "pages_unmapped"}),
    Metric("scrubbed_pages", "counter", "Pages zeroed for --vattn-scrub.", "", {"": "pages_scrubbed"}),
    Metric("driver_errors", "counter", "Driver calls that failed.", "", {"": "errors"}),
    Metric("row_waits", "counter", "Waits for a row to be mapped.", "", {"": "waits"}),
    Metric("row_wait_seconds", "counter", "Time in those waits.", "", {"": "wait_ns"}, 1e-9),
    Metric(
        "batches",
        "counter",
        "Batches by how attention read the cache.",
        "read",
        {"rows": "batches_rows", "pages": "batches_pages", "shared": "batches_shared"},
    ),
    Metric("shared_groups", "counter", "Groups that read a prefix once, each decode step.", "", {"": "groups"}),
    Metric("shared_group_members", "counter", "Requests in those groups.", "", {"": "members"}),
    Metric("shared_saved_tokens", "counter", "Tokens not read again by those groups.", "", {"": "tokens_saved"}),
    Metric(
        "observe_seconds",
        "counter",
        "Scheduler time spent on these metrics and the log line (stats) and on the page (state).",
        "for",
        {"stats": "observe_ns", "state": "state_ns"},
        1e-9,
    ),
)


class Metrics:
    """The metrics of one scheduler."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        # imported here: SGLang sets PROMETHEUS_MULTIPROC_DIR before prometheus_client may be imported
        from prometheus_client import Counter, Gauge

        self._gauges: list[tuple[str, float, Any]] = []
        self._counters: list[tuple[str, float, Any]] = []
        self._shown: dict[str, int] = {}
        for metric in METRICS:
            names = [*labels, *([metric.label] if metric.label else [])]
            family: Any
            if metric.kind == "gauge":
                family = Gauge(PREFIX + metric.name, metric.help, names, multiprocess_mode="mostrecent")
            else:
                family = Counter(PREFIX + metric.name, metric.help, names)
            series = self._gauges if metric.kind == "gauge" else self._counters
            for value, fact in metric.facts.items():
                child = family.labels(**labels, **({metric.label: value} if metric.label else {}))
                series.append((fact, metric.scale, child))

    def export(self, facts: Mapping[str, int]) -> None:
        """Show these facts; only what changed is written."""
        shown = self._shown
        for fact, scale, child in self._gauges:
            if shown.get(fact) != facts[fact]:
                child.set(facts[fact] * scale)
        for fact, scale, child in self._counters:
            more = facts[fact] - shown.get(fact, 0)
            if more > 0:
                child.inc(more * scale)
        self._shown = dict(facts)
