# SPDX-License-Identifier: Apache-2.0
"""A plain scheduler: first come, first served, oldest first; chunked prefill, decode, retraction."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.reliability.engine import Engine
from tests.reliability.invariants import check, check_rows
from tests.reliability.model import Job


def serve(
    engine: Engine,
    jobs: list[Job],
    outputs: int = 12,
    chunk: int = 9,
    *,
    after_step: Callable[[], None] = lambda: None,
) -> int:
    """Serve every job to its end, oldest first; returns the steps taken. A scheduler that is stuck fails here."""
    rng, waiting, steps = random.Random(1), list(jobs), 0
    while waiting or engine.running:
        steps += 1
        assert steps < 100 * len(jobs), f"stuck with {len(waiting)} waiting and {len(engine.running)} running"
        if not any(run.in_prefill for run in engine.running):
            began = engine.admit(waiting, chunk)
            del waiting[: len(began)]
        for run in engine.running:
            if run.in_prefill:
                engine.continue_prefill(run, chunk)
            elif len(run.req.output_ids) == 0:
                engine.checkpoint(run)
        retracted = engine.tried["retracted"]
        before = list(engine.running)
        engine.decode([rng.randrange(3)])
        if engine.tried["retracted"] > retracted:
            waiting = [run.job for run in before if run not in engine.running] + waiting
        for run in engine.running[:]:
            if len(run.req.output_ids) >= outputs:
                engine.release(run, checkpoint=True)
        check(engine)
        check_rows(engine)
        after_step()
    return steps


def mixed_jobs(count: int, seed: int = 3) -> list[Job]:
    rng = random.Random(seed)
    documents = [[rng.randrange(3) for _ in range(30)] for _ in range(3)]
    return [
        Job(
            (*rng.choice(documents)[: rng.randrange(1, 28)], *rng.choices(range(3), k=rng.randrange(1, 5))),
            new_tokens=1,
        )
        for _ in range(count)
    ]
