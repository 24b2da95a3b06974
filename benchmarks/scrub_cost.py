# SPDX-License-Identifier: Apache-2.0
"""What `--vattn-scrub` costs: each prompt is of a tenant of its own, so every page that it takes is zeroed first.

    python -m benchmarks.scrub_cost

Two engines side by side on one GPU, with the flag and without, measured in turns (`beside.py`): a cold prompt of 8k
tokens, and 16 of 512 at once, each with another cache salt and nothing shared. The pool is small enough that every page
has had another tenant before. Seconds are to the last first token.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.arms import SMALL_POOL_TOKENS
from benchmarks.beside import engines, in_turns
from benchmarks.common import RESULTS, ResultFile
from benchmarks.serve_ab import Arm, write_model

ARMS = ("vattn_scrub_off", "vattn")  # the second is compared with the first


class Prompts(NamedTuple):
    number: int
    tokens: int


KINDS = {"one_8k": Prompts(1, 8192), "sixteen_512": Prompts(16, 512)}


class NewTenants:
    """An order is a number of prompts; each comes from a tenant that was never here."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.tenants = arm, 0
        for _ in range(SMALL_POOL_TOKENS // KINDS["one_8k"].tokens + 2):  # every page has had a tenant
            self(KINDS["one_8k"])

    def __call__(self, order: Prompts) -> float:
        salts = [f"tenant {self.tenants + each}" for each in range(order.number)]
        self.tenants += order.number
        prompts = [self.arm.tokens(order.tokens) for _ in salts]
        start = time.perf_counter()
        answers = self.arm.engine.generate(
            input_ids=prompts, cache_salt=salts, sampling_params={"temperature": 0, "max_new_tokens": 1}
        )
        seconds = time.perf_counter() - start
        assert not any(answer["meta_info"]["cached_tokens"] for answer in answers)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "scrub_cost.json")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        engines(NewTenants, ARMS, write_model(scratch), Path(scratch)) as arms,
    ):
        results = ResultFile(args.out, "scrub_cost", ["arm"], device="cuda")
        before = [engine.counters()["pages_scrubbed"] for engine in arms]
        in_turns(arms, KINDS, times={}, rounds=args.rounds)
        for engine, scrubbed in zip(arms, before, strict=True):
            results.add(engine.row() | {"pages_scrubbed": engine.counters()["pages_scrubbed"] - scrubbed})
    for row in results.rows:
        kinds = "  ".join(f"{kind} {row[f'{kind}_ms']:.2f} ms" for kind in KINDS)
        print(f"{row['arm']:<14} {kinds}  {row['pages_scrubbed']} pages scrubbed  {row['spread']}")


if __name__ == "__main__":
    main()
