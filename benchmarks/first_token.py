# SPDX-License-Identifier: Apache-2.0
"""Time to first token of hits, the arms' engines side by side on one GPU and measured in turns.

    python -m benchmarks.first_token

A processor of a rented machine has faster and slower minutes, and a lone hit is bound by the processor: one arm after
the other, as `serve_ab.py` measures, tells 2 % from nothing only by luck. Here every engine has the same prefix of 8k
tokens cached; a round is, for each arm, a burst of 64 hits at once and a few lone hits, the arm that begins changing
from round to round. Each figure is the median over the rounds, its spread the distance of the quartiles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.arms import BESIDE_OTHERS
from benchmarks.common import RESULTS, ResultFile, Row, median, progress, quartile_spread
from benchmarks.serve_ab import ARMS, QUESTION, TABLE_ARMS, Arm, write_model

PREFIX, BURST, LONE = 8192, 64, 5
KINDS = {"burst": BURST, "lone": 1}


def serve(orders: Any, name: str, model: str, extra: dict[str, Any], log: str) -> None:
    """An arm's process: for each order (a number of hits) the seconds until all have their token; None ends it."""
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    arm = Arm(name, model, 1, extra)
    document = arm.tokens(PREFIX)
    arm.run([document + arm.tokens(QUESTION)], 1)
    orders.send("ready")
    while (hits := orders.recv()) is not None:
        seconds, cached = arm.run([document + arm.tokens(QUESTION) for _ in range(hits)], 1)
        assert cached >= hits * PREFIX, f"{cached} of {hits} x {PREFIX} tokens were cached"
        orders.send(seconds)
    arm.engine.shutdown()


class Engine:
    """The benchmark's side of an arm's process."""

    def __init__(self, name: str, model: Path, extra: dict[str, Any], log: Path) -> None:
        self.name, self.log = name, log
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, name, str(model), extra, str(log)))
        self._process.start()
        theirs.close()

    def ask(self, hits: int) -> float:
        """Seconds until so many hits have their token."""
        with suppress(BrokenPipeError):  # it is gone: receive() says why
            self._orders.send(hits)
        return float(self.receive())

    def receive(self) -> Any:
        """The next that the process says; RuntimeError with the end of its log if it is gone."""
        try:
            return self._orders.recv()
        except EOFError as error:
            raise RuntimeError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}") from error

    def close(self) -> None:
        if self._process.is_alive():
            self._orders.send(None)
        self._process.join(30)
        self._process.kill()

    def row(self) -> Row:
        return {
            "arm": self.name,
            **{f"{kind}_ms": median(values) * 1e3 for kind, values in self.seconds.items()},
            "spread": {f"{kind}_ms": quartile_spread(values) for kind, values in self.seconds.items()},
            "raw": self.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "first_token.json")
    parser.add_argument("--arms", nargs="+", default=TABLE_ARMS, choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = write_model(scratch)
        engines = []
        for name in args.arms:
            engines.append(Engine(name, model, BESIDE_OTHERS, Path(scratch, f"{name}.log")))
            stack.callback(engines[-1].close)
        for engine in engines:
            engine.receive()  # it is ready
        results = ResultFile(args.out, "first_token", ["arm"], device="cuda")
        for number in progress(range(args.rounds + 1), "rounds"):
            begin = number % len(engines)
            for engine in engines[begin:] + engines[:begin]:
                for kind in ["burst", *["lone"] * LONE]:
                    seconds = engine.ask(KINDS[kind])
                    if number > 0:  # the first compiles
                        engine.seconds[kind].append(seconds)
        for engine in engines:
            results.add(engine.row())
    for row in results.rows:
        print(f"{row['arm']:<14} burst {row['burst_ms']:.1f} ms  lone {row['lone_ms']:.2f} ms  {row['spread']}")


if __name__ == "__main__":
    main()
