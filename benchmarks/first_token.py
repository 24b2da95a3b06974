# SPDX-License-Identifier: Apache-2.0
"""Time to first token of hits, the arms' engines side by side on one GPU and measured in turns.

    python -m benchmarks.first_token

Every engine has the same prefix of 8k tokens cached; a round is, for each arm, a burst of 64 hits at once and a few
lone hits, the arm that begins changing from round to round. Each figure is the median over the rounds, its spread the
distance of the quartiles; ours is held against stock's in each round.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import table_rows
from benchmarks.beside import engines, in_turns
from benchmarks.common import RESULTS, ResultFile
from benchmarks.serve_ab import ARMS, QUESTION, TABLE_ARMS, Arm, write_model

PREFIX, BURST, LONE = 8192, 64, 5
KINDS = {"burst": BURST, "lone": 1}


class Hits:
    """An order is a number of hits on one cached prefix; all are asked at once, for one token each."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.document = arm, arm.tokens(PREFIX)
        self._ask(1)

    def _ask(self, hits: int) -> tuple[float, int]:
        return self.arm.run([self.document + self.arm.tokens(QUESTION) for _ in range(hits)], 1)

    def __call__(self, hits: int) -> float:
        seconds, cached = self._ask(hits)
        assert cached >= hits * PREFIX, f"{cached} of {hits} x {PREFIX} tokens were cached"
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "first_token.json")
    parser.add_argument("--arms", nargs="+", default=TABLE_ARMS, choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        engines(Hits, args.arms, write_model(scratch), Path(scratch)) as arms,
    ):
        results = ResultFile(args.out, "first_token", ["arm"], device="cuda")
        in_turns(arms, KINDS, times={"lone": LONE}, rounds=args.rounds)
        for engine in arms:
            results.add(engine.row())
    print("\n".join(" | ".join(cells) for cells in table_rows.first_token({"rows": results.rows})))


if __name__ == "__main__":
    main()
