# SPDX-License-Identifier: Apache-2.0
"""Metrics, /server_info, /vattn/state, the log line and the core tell the same, at rest and under load."""

from __future__ import annotations

import re
import time

from sglang_vattn.observe.metrics import METRICS
from sglang_vattn.observe.page_states import STATES
from tests.observe.support import (
    Load,
    expected_metrics,
    held,
    metrics,
    numbers,
    row_pages,
    state,
    without_moving,
)
from tests.support.checks import PAGE_STATES
from tests.support.server import Server

LIMIT_US_A_STEP = 20.0


def assert_agreement(server: Server) -> dict[str, int]:
    """At a point where nothing changes: all views are one. Returns the facts."""
    facts = server.vattn()
    shown, whole = metrics(server), state(server)
    wanted = expected_metrics(facts)
    different = {key: (shown.get(key), value) for key, value in wanted.items() if not near(shown.get(key), value)}
    assert not different, f"metrics against /server_info: {different}"
    assert without_moving(whole["facts"]) == without_moving(facts)
    assert whole["problems"] == [], "check_integrity()"

    states = numbers(whole["states"], 1)
    assert len(states) == facts["num_pages"] + 2
    counted = {name: states.count(STATES.index(name)) for name in STATES}
    assert {name: counted[name] for name in PAGE_STATES} == {name: facts[name] for name in PAGE_STATES}
    assert (counted["padding"], counted["guard"]) == (facts["padding_pages"], facts["guard_pages"]) == (1, 1)
    sharers = numbers(whole["sharers"], 2)
    assert sum(count > 0 for count in sharers) == facts["shared_pages"]
    assert sum(sharers) == facts["shared_page_holders"] == sum(row["shared"] for row in whole["rows"])
    assert len(whole["rows"]) == facts["requests"]
    assert sum(row["ready"] for row in whole["rows"]) == facts["rows_ready"]
    held_pages = row_pages(whole)
    own = [
        page
        for row, pages in zip(whole["rows"], held_pages, strict=True)
        for page in pages[row["shared"] : len(pages) - row["ahead"]]
    ]
    assert len(own) == len(set(own)) == facts["private"]
    assert sum(row["ahead"] for row in whole["rows"]) == facts["reserved"]
    waste = sum(
        (len(pages) - row["ahead"]) * facts["page_size"] - row["tokens"]
        for row, pages in zip(whole["rows"], held_pages, strict=True)
    )
    assert waste == facts["waste_tokens"]
    assert 0 <= waste < facts["page_size"] * max(1, facts["requests"])
    return facts


def near(shown: float | None, wanted: float) -> bool:
    return shown is not None and abs(shown - wanted) <= 1e-9 * max(1.0, abs(wanted))


def test_all_views_agree_under_load(large: Server) -> None:
    load = Load(large, clients=12, new_tokens=120)
    points = []
    with load.running():
        for _ in range(4):
            time.sleep(2)
            with held(large):
                points.append(assert_agreement(large))
    for name in ("requests", "shared_pages", "mappings", "private", "protected", "aliased_tokens", "copied_tokens"):
        assert max(facts[name] for facts in points) > 0, f"{name}: it was to be under load"
    assert points[-1]["batches_rows"] > 0 and points[-1]["pages_mapped"] > 0
    assert_agreement(large)
    large.assert_clean()


def test_metrics_follow_an_idle_server_by_themselves(large: Server) -> None:
    """SGLang itself refreshes its metrics only every 30 s when idle."""
    large.generate(list(range(200)), 4)
    time.sleep(3)
    shown = metrics(large)  # read before anything else is asked
    wanted = expected_metrics(large.vattn())
    assert [key for key, value in wanted.items() if not near(shown[key], value)] == []
    large.flush()
    time.sleep(3)
    assert metrics(large)["sglang:vattn_pages", "free"] == large.vattn()["num_pages"]


def test_every_metric_is_exported(large: Server) -> None:
    wanted = {(metric.exported, label) for metric in METRICS for label in metric.facts}
    assert metrics(large).keys() == wanted
    text = large.text("/metrics")
    line = next(line for line in text.splitlines() if line.startswith("sglang:vattn_pages{"))
    stock = next(line for line in text.splitlines() if line.startswith("sglang:num_running_reqs{"))
    names = re.compile(r'(\w+)="')
    assert set(names.findall(line)) == {*names.findall(stock), "state"}, "SGLang's own labels, and ours"


def test_cost_of_metrics_and_log_line(large: Server) -> None:
    """Amortised, with many requests running: what the scheduler itself counted, a batch."""
    before = large.vattn()
    with Load(large, clients=32, new_tokens=60).running():
        time.sleep(12)
    after = large.vattn()
    spent = after["observe_ns"] - before["observe_ns"]
    batches = sum(after[name] - before[name] for name in ("batches_rows", "batches_pages", "batches_shared"))
    assert batches > 50
    print(f"\n{spent / batches / 1e3:.1f} us a batch over {batches} batches")
    assert spent / batches / 1e3 < LIMIT_US_A_STEP


def test_log_line(large: Server) -> None:
    large.together([[7] * 300 + [n] for n in range(4)], 90)
    lines = [line for line in large.log().splitlines() if "Decode batch" in line or "Prefill batch" in line]
    part = re.compile(r", vattn: pages \d+/7000, shared \d+ x \d+\.\d, rows \d+ ready, maps \d+/s, ")
    assert lines
    assert all(part.search(line) for line in lines)
    assert any("Decode batch" in line for line in lines)


def test_nothing_of_a_request_leaves(large: Server) -> None:
    """Neither its text or tokens, nor its id, nor its tenant's name."""
    body = {
        "text": "my secret prompt",
        "rid": "secret-request",
        "extra_key": "secret-tenant",
        "sampling_params": {"max_new_tokens": 60, "ignore_eos": True},
    }
    large.text("/generate", body)
    answer = large.text("/vattn/state")
    assert "secret" not in answer
    whole = state(large)
    assert any(re.fullmatch(r"[0-9a-f]{6}", node["namespace"]) for node in whole["tree"]), "a hash instead"
    allowed = {"id", "parent", "namespace", "start", "end", "pages", "hits", "locks", "below", "tokens_below"}
    assert all(node.keys() == allowed for node in whole["tree"])
    assert "/vattn/state" not in large.log(), "viewers do not fill the log"
