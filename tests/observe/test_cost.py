# SPDX-License-Identifier: Apache-2.0
"""What looking costs the scheduler, on the real bookkeeping without a server: 256 requests over 7,000 pages."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from sglang_vattn.radix import PrefixTree

from sglang_vattn import _core
from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.observe import tree_view
from sglang_vattn.observe.observer import Observer
from sglang_vattn.observe.page_states import STATES
from sglang_vattn.reading import Reading
from sglang_vattn.request_pages import RequestPages
from sglang_vattn.rows import RowTable
from sglang_vattn.scrub import Scrub

PAGES, REQUESTS, SIZE = 7000, 256, 128
SHARED, OWN = 500, 12
MAPPED = 40
DECODE_STEPS = 40  # SGLang reports once in so many
LIMIT_US_A_STEP = 20.0


def fastest_us(call: Callable[[], object], times: int = 30) -> float:
    """The machine is shared: the least time is what the work takes."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


@pytest.fixture(scope="module")
def observer() -> Iterator[Observer]:
    """An observer of a pool in which 256 requests share a prefix of 500 pages."""
    pages = _core.Pages(PAGES)
    space = _core.AddressSpace(_core.HostDriver(), PAGES, 4096, REQUESTS + 2, SHARED + OWN + 2)
    pool = SimpleNamespace(
        **{"space": space, "device": "cpu", "read_ahead": 1, "page_size": SIZE, "row_tokens": SIZE * 514},
        num_pages=PAGES,
        geometry=SimpleNamespace(page_bytes=4096, token_bytes=32),
    )
    allocator = VattnAllocator.__new__(VattnAllocator)
    rows = RowTable(cast(Any, pool), REQUESTS)
    tree = PrefixTree(pages, SIZE)
    prefix = pages.take(SHARED)
    assert prefix is not None
    tokens = list(range(SHARED * SIZE))
    node = tree.insert(tokens, prefix).node
    pages.release(prefix)
    allocator.__dict__.update(
        pages=pages, requests={}, admitted={}, rows=rows, _kvcache=pool, page_size=SIZE, hit_tokens=0, pages_aliased=0,
        tokens_copied=0, scrub=Scrub(cast(Any, pool), enabled=False),
        tree_cache=SimpleNamespace(tree=tree, evicted_pages=0),
        reading=Reading("auto", rows, page_size=128, page_bytes_per_layer=1024, share=True),
    )  # fmt: skip
    running = []
    for slot in range(REQUESTS):
        own = pages.take(OWN)
        assert own is not None
        tree.lock(node)
        request = RequestPages(prefix + own, SHARED, needed=SHARED + OWN, slot=slot)
        allocator.requests[slot] = request
        if slot < MAPPED:
            rows.grow(request)
        else:  # as if it were: the host cannot map so much
            request.row, request.valid = space.acquire_row(), request.backed
        kv = SimpleNamespace(req_pool_idx=slot, kv_allocated_len=(SHARED + OWN) * SIZE - slot % SIZE)
        running.append(SimpleNamespace(kv=kv))
    for n in range(400):  # and a tree of some size
        branch = pages.take(3)
        assert branch is not None
        tree.insert([*tokens[: (n % SHARED) * SIZE], 10**6 + n, *range(300)], prefix[: n % SHARED] + branch)
        pages.release(branch)
    labels = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
    scheduler = SimpleNamespace(
        metrics_reporter=SimpleNamespace(
            current_scheduler_metrics_enabled=True, metrics_collector=SimpleNamespace(labels=labels)
        ),
        invariant_checker=SimpleNamespace(_requests_owning_rows=lambda: running),
    )
    assert space.drain(120)
    yield Observer(scheduler, allocator)
    space.close()


def test_a_decode_report(observer: Observer) -> None:
    def report() -> None:
        observer.allocator.reading.counters["batches_rows"] += DECODE_STEPS
        observer._recent = (0.0, {})
        observer.log_part()
        observer.export(interval_s=0.0)

    cost = fastest_us(report)
    print(f"\nlog line and metrics, {REQUESTS} requests: {cost:.0f} us a report, {cost / DECODE_STEPS:.1f} us a step")
    assert cost / DECODE_STEPS < LIMIT_US_A_STEP


def test_a_request_that_comes_and_goes(observer: Observer) -> None:
    requests = observer.allocator.requests
    slot, request = next(iter(requests.items()))

    def come_and_go() -> None:
        del requests[slot]
        observer.shared.update(observer.allocator)
        requests[slot] = request
        observer.shared.update(observer.allocator)

    cost = fastest_us(come_and_go)
    print(f"\na request with {SHARED} shared pages: {cost:.0f} us once")
    assert cost < 1000


def test_facts_and_state_are_right(observer: Observer) -> None:
    facts = observer.facts()
    assert (facts["shared_pages"], facts["shared_page_holders"]) == (SHARED, SHARED * REQUESTS)
    assert facts["rows_ready"] == facts["requests"] == REQUESTS
    assert facts["waste_tokens"] == sum(slot % SIZE for slot in range(REQUESTS))
    state = observer.state()
    assert len(base64.b64decode(state["states"])) == PAGES + 2
    cost = fastest_us(observer.state, 5)
    print(f"\nthe whole state, asked for by the page: {cost / 1e3:.1f} ms")
    assert cost < 50_000


def test_a_large_tree_is_not_walked_at_every_look(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that took 50 ms is paid for after 25 s; pages that were freed meanwhile are nobody's."""
    clock = SimpleNamespace(now=1000.0, spent=0.0)

    def thread_time() -> float:
        clock.spent += 0.05
        return float(clock.spent)

    monkeypatch.setattr(tree_view, "time", SimpleNamespace(monotonic=lambda: clock.now, thread_time=thread_time))
    allocator, view = observer.allocator, tree_view.TreeView()
    tree, pages = allocator.tree_cache.tree, allocator.pages  # type: ignore[union-attr]

    def look() -> tuple[int, np.ndarray]:
        states = np.frombuffer(pages.states() + b"\0", dtype=np.uint8)
        view.renew(allocator, states)
        return len(set(view.nodes_of(states).tolist()) - {0}), states

    shown, states = look()
    assert shown == tree.num_nodes and view.age_s == 0
    assert (look()[0], view.age_s) == (shown, 0)  # nothing has changed

    tree.evict(1)
    fresh = pages.take(2)
    assert fresh is not None
    tree.insert([7] * 2 * SIZE, fresh)
    pages.release(fresh)
    clock.now += 24
    stale, states = look()
    assert view.age_s == 24 and stale < tree.num_nodes  # the new node is not seen
    assert not view.nodes_of(states)[states == STATES.index("free")].any()
    clock.now += 2
    assert look()[0] == tree.num_nodes and view.age_s == 0


def test_locks_and_an_empty_tree_are_seen_at_once() -> None:
    pages = _core.Pages(8)
    tree = PrefixTree(pages, SIZE)
    allocator = cast(Any, SimpleNamespace(tree_cache=SimpleNamespace(tree=tree), pages=pages))
    taken = pages.take(2)
    assert taken is not None
    node = tree.insert(list(range(2 * SIZE)), taken).node
    pages.release(taken)
    view = tree_view.TreeView(float("inf"))

    def look() -> list[int]:
        view.renew(allocator, np.frombuffer(pages.states() + b"\0", dtype=np.uint8))
        return [each["locks"] for each in view.top]

    assert look() == [0]
    for locks in (1, 2):
        tree.lock(node)
        assert look() == [locks]
    for _ in range(2):
        tree.unlock(node)
    assert look() == [0]
    view._due_s = float("inf")  # no walk is paid for any more
    tree.evict(2)
    assert look() == [] and view.age_s == 0
