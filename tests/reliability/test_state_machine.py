# SPDX-License-Identifier: Apache-2.0
"""Anything a scheduler may do, in any order, against the trivially true model.

`VATTN_FUZZ_STEPS` says how many steps (`make fuzz`: two million). What was tried is printed, and written to
build/reliability/state-machine.json.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.reliability.engine import CONTEXT, Engine, Run, Shape
from tests.reliability.engine import settings as sglang_settings
from tests.reliability.invariants import check, check_end, check_everything, check_rows
from tests.reliability.model import Job, Namespace

STEPS = int(os.environ.get("VATTN_FUZZ_STEPS", 50_000))
STEPS_A_RUN = 100
STEPS_A_SEARCH = 50_000  # hypothesis remembers all that it tried: 4 KB a step

# Documents that share prefixes with one another, and part at every offset in a page.
DOCUMENTS = ([0] * 40, [0] * 11 + [1] * 29, [0, 1, 2] * 13)
# Equal when SGLang concatenates extra key and LoRA id, or prints them; different tenants all the same.
TENANTS: tuple[Namespace, ...] = (
    (None, None, None),
    ("ab", None, None),
    ("a", "b", None),
    (None, "ab", None),
    ("abb", None, None),
    ("ab", "b", None),
    ("a", None, "b"),
    (None, None, "ab"),
)
SHAPES = (
    Shape(),
    Shape(page_size=2, pages=30, slots=4, policy="lfu"),
    Shape(page_size=3, pages=16, read_ahead=7, policy="slru"),
    Shape(page_size=4, pages=24, slots=9, read_ahead=9),
    Shape(page_size=4, pages=18, read_ahead=5, scrub=False),
    Shape(page_size=4, pages=14, rows=2, policy="priority"),
    Shape(page_size=4, pages=20, max_mappings=6),
    Shape(page_size=8, pages=8, read="rows", read_ahead=3),
    Shape(page_size=16, pages=6, read="pages"),
    Shape(page_size=5, pages=12, slots=3, rows=12),
)

DELAYS = st.sampled_from([0, 0.0003, 0.002])
tried: Counter[str] = Counter()
jobs = st.builds(
    lambda document, cut, tail, tenant, room: Job(
        (*DOCUMENTS[document][:cut], *(int(digit) for digit in str(tail))), room, TENANTS[tenant], tail % 3
    ),
    st.integers(0, 2), st.integers(0, CONTEXT // 2), st.integers(0, 2222), st.sampled_from([0, 0, 0, *range(8)]),
    st.integers(0, 8),
)  # fmt: skip


class Scheduler(RuleBasedStateMachine):
    engine: Engine

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: Shape) -> None:
        self.engine = Engine(shape)
        self.waiting: list[Job] = []
        self.steps = 0

    @rule(arrivals=st.lists(jobs, min_size=1, max_size=3), chunk=st.sampled_from([3, 9, 100]))
    def admit(self, arrivals: list[Job], chunk: int) -> None:
        arrivals = [*self.waiting, *arrivals]
        self.waiting = []
        self.engine.admit(arrivals, chunk)

    # Rules are chosen alike; most of a scheduler's steps are these two.
    @rule(arrivals=st.lists(jobs, min_size=1, max_size=2), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def admit_and_decode(self, arrivals: list[Job], tokens: list[int]) -> None:
        for run in self.engine.admit(arrivals, chunk=100):
            self.engine.checkpoint(run)
        check(self.engine)
        self.engine.decode(tokens)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4), times=st.integers(1, 6))
    def decode(self, tokens: list[int], times: int) -> None:
        for _ in range(times):
            self.engine.decode(tokens)
            check(self.engine)

    @precondition(lambda self: self.engine.running)
    @rule(which=st.integers(0, 8), chunk=st.integers(1, 12))
    def go_on(self, which: int, chunk: int) -> None:
        run = self.pick(which)
        if run.in_prefill:
            self.engine.continue_prefill(run, chunk)
        else:
            self.engine.checkpoint(run)

    @precondition(lambda self: self.engine.running)
    @rule(
        which=st.integers(0, 8),
        how=st.sampled_from(["finish", "finish", "finish", "abort", "retract"]),
        drop=st.sampled_from([0, 0, 1, 5]),
    )
    def end(self, which: int, how: str, drop: int) -> None:
        run = self.pick(which)
        if how == "retract":
            self.waiting.append(self.engine.retract(run))
        else:
            self.engine.release(run, checkpoint=how == "finish", drop=drop)

    @rule(job=jobs)
    def look(self, job: Job) -> None:
        """A waiting request: matched and touched, never locked."""
        run = Run(job, "waiting")
        run.req.init_next_round_input(self.engine.tree)
        assert run.req.prefix_len == self.engine.model.expected_hit(run.hashes, len(job.tokens) - 1)
        self.engine.tree.touch(run.req)

    @rule(pages=st.sampled_from([0, 1, 1, 1, 2, 2, 3, 4]))
    def evict_or_flush(self, pages: int) -> None:
        """SGLang refuses a flush while anything runs."""
        if pages == 0 and not self.engine.running:
            self.engine.flush()
        free = self.engine.allocator.pages.free
        freed = self.engine.tree.evict_pages(pages)
        assert freed == self.engine.allocator.pages.free - free
        assert freed >= pages or self.engine.tree.evictable_size() == 0
        self.engine.model.learn_evictions()

    @rule(what=st.sampled_from(["map", "set_access", "unmap", ""]), k=st.integers(0, 4), seconds=DELAYS)
    def driver(self, what: str, k: int, seconds: float) -> None:
        """Mapping becomes slow, or fails once; k = 0: it catches up, and everything is compared with everything."""
        if k == 0:
            self.calm()
            self.engine.settle()
            check_everything(self.engine)
        elif seconds and what:
            self.engine.driver.set_delay(what, seconds)
        elif not self.engine.driver.armed:
            self.engine.driver.fail_at(what, k)
            tried["faults_armed"] += 1

    def pick(self, which: int) -> Run:
        return self.engine.running[which % len(self.engine.running)]

    def calm(self) -> None:
        for call in ("map", "set_access", "unmap", ""):
            self.engine.driver.set_delay(call, 0)
            self.engine.driver.fail_at(call, 0)

    @invariant()
    def holds(self) -> None:
        check(self.engine)
        check_rows(self.engine)
        tried["steps"] += 1

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.calm()
            for run in self.engine.running[:]:
                self.engine.release(run, checkpoint=len(run.tokens) % 2 == 0)
            check_end(self.engine)
            tried.update(self.engine.tried)
            tried["driver_errors"] += self.engine.space.stats()["errors"]
            tried["runs"] += 1
        finally:
            self.engine.close()


def test_any_order(root: Path) -> None:
    with sglang_settings():
        while (left := STEPS - tried["steps"]) > 0:  # some runs are shorter than STEPS_A_RUN
            run_state_machine_as_test(
                Scheduler,
                settings=settings(
                    max_examples=1 + min(left, STEPS_A_SEARCH) // STEPS_A_RUN,
                    stateful_step_count=STEPS_A_RUN,
                    deadline=None,
                    database=None,
                    phases=(Phase.generate, Phase.shrink),
                    suppress_health_check=list(HealthCheck),
                ),
            )
            print(f"{tried['steps']:,} steps", flush=True)
    report = root / "build" / "reliability" / "state-machine.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    if "VATTN_TEST_CORE" not in os.environ:  # the short form under a sanitizer
        report.write_text(json.dumps(tried, indent=1, sort_keys=True))
    print(json.dumps(tried, sort_keys=True))
    # A machine that never gets anywhere would find nothing.
    for what in ("hits_in_mid_page", "read_by_rows", "read_by_paged", "groups", "chunks", "waits", "driver_errors"):
        assert tried[what] >= STEPS // 5000, f"{what}: {tried[what]}"
