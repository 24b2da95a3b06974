# SPDX-License-Identifier: Apache-2.0
"""Load, and the configuration in which the spike once lost a request. `make soak` runs the long forms."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.reliability.conftest import SOAK
from tests.reliability.load import Known, Load
from tests.serving.test_pressure import Aborter
from tests.support.checks import unharmed
from tests.support.server import STRICT, Server

CONNECTIONS, REQUESTS = (500, 10_000) if SOAK else (60, 400)
SPIKE_RUNS = 20 if SOAK else 3
GROWTH_BYTES = 150 << 20  # of each process, between a first load and all of it


def memory_of(server: Server) -> dict[int, int]:
    """Resident bytes by process, without what is shared (the KV cache is a memfd, all there from the start)."""
    scheduler = psutil.Process(server.scheduler_pid())
    family = [*scheduler.parents()[:1], scheduler]
    return {process.pid: process.memory_info().rss - process.memory_info().shared for process in family}


def test_mixed_load(small: Server, known: list[Known], root: Path) -> None:
    with unharmed(small):
        warm = Load(small, known, CONNECTIONS, seed=1)
        asyncio.run(warm.run(REQUESTS // 10))
        before = memory_of(small)
        load = Load(small, known, CONNECTIONS, seed=2)
        asyncio.run(load.run(REQUESTS))
        grown = {pid: size - before[pid] for pid, size in memory_of(small).items()}
        counters = small.vattn()
    report = {"outcomes": dict(sorted(load.outcomes.items())), "grown_bytes": grown, "vattn": counters}
    (root / "build" / "reliability").mkdir(parents=True, exist_ok=True)
    (root / "build" / "reliability" / "load.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report["outcomes"]))
    assert not load.wrong, f"{len(load.wrong)} of {REQUESTS}:\n" + "\n".join(load.wrong[:10])
    assert sum(load.outcomes.values()) >= REQUESTS
    assert load.outcomes["abort: abort"] and load.outcomes["disconnect: left"]
    assert load.outcomes["too_long: refused"] + load.outcomes["too_long: abort"] > 0
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert counters["requests"] == 0


def test_priorities_without_overlap_and_aborts(llama: Path, known: list[Known], tmp_path: Path) -> None:
    """90 jobs, 16 at once, others aborted among them; ids have one width, since SGLang aborts by prefix."""
    flags = ["--kv-backend=vattn", "--page-size=16", "--chunked-prefill-size=64", "--max-total-tokens=4096"]
    flags += ["--disable-overlap-schedule", "--enable-priority-scheduling"]
    with Server(llama, tmp_path, flags, env=STRICT) as server:
        for run in range(SPIKE_RUNS):
            rng = random.Random(run)
            jobs = [(number, each, rng.randrange(1, 49)) for number, each in enumerate(known)]

            def one(job: tuple[int, Known, int], run: int = run) -> bool:
                number, each, tokens = job
                answer = server.generate(each.prompt, tokens, rid=f"job-{run:04d}-{number:06d}")
                return answer.output == each.output[:tokens]

            with unharmed(server):
                with Aborter(server, [each.prompt for each in known[:8]]), ThreadPoolExecutor(16) as pool:
                    right = list(pool.map(one, jobs))
                assert sum(right) == len(known) == 90, f"run {run}: {sum(right)} of 90"
        print(f"{SPIKE_RUNS} runs of 90 jobs: 90 of 90 each")
