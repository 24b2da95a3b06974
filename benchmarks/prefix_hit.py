# SPDX-License-Identifier: Apache-2.0
"""The prefix-hit benchmark: what shared prefixes gain, by their length, number and members, on one's own load.

    python -m benchmarks.prefix_hit --device cuda
    python -m benchmarks.prefix_hit --device cuda --sweeps prefix arrival --arms vattn stock_page1
    python -m benchmarks.prefix_hit --urls vattn=http://127.0.0.1:30000 --model MODEL --sweeps members

Each sweep changes one thing about a base load. The load is SGLang's own bench_serving (generated-shared-prefix, token
ids); each arm's server starts once and runs all loads, the base load once for all sweeps. Before each the cache is
flushed and every prefix sent once, which is the cold TTFT; so all requests of the load find their prefix, on every arm
but ``stock_no_hits``. Figures are medians over the rounds (each with other prompts), the spread is
`common.spread_over_starts`; every round is kept under ``raw``. A run that is stopped, or that ``--seconds`` ends (exit
status 1), keeps the rounds it has; with ``--resume`` another does the rest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arms import ARMS, counters, model_for, serving
from benchmarks.common import RESULTS, ResultFile, Row, median, progress, spread_over_starts, start_of
from benchmarks.loads import Sampler, bench_serving, prefixes
from tests.support.client import Client

AT_ONCE, ONE_BY_ONE = "at once", "one by one"
MOVED = ("map_calls", "unmap_calls", "tokens_copied")
WARM_UP_SEED = 99


class Load(NamedTuple):
    """What is asked of a server. ``arrival`` is `AT_ONCE`, `ONE_BY_ONE` or requests a second (Poisson)."""

    prefix: int = 8192
    members: int = 16
    prefixes: int = 4
    own: int = 64
    output: int = 128
    arrival: str | float = AT_ONCE
    zipf: float | None = None

    @property
    def requests(self) -> int:
        return self.members * self.prefixes


# sweep -> the values of its field; a pair of values stands for (prefixes, zipf)
Sweeps = dict[str, tuple[Any, ...]]
BASE = {"cuda": Load(), "cpu": Load(prefix=1024, members=6, prefixes=2, own=32, output=8)}
SWEEPS: dict[str, Sweeps] = {
    "cuda": {
        "prefix": (512, 2048, 8192, 32768),
        "members": (1, 4, 16, 64),
        "prefixes": (1, 4, 16),
        "own": (16, 256, 2048),
        "output": (1, 128, 512),
        "arrival": (AT_ONCE, 4.0, 16.0, ONE_BY_ONE),
        "zipf": (None, 1.0, 1.5),
    },
    "cpu": {
        "prefix": (512, 1024, 3072),
        "members": (1, 6, 12),
        "prefixes": (1, 2, 4),
        "own": (8, 32, 256),
        "output": (1, 8, 32),
        "arrival": (AT_ONCE, 2.0, ONE_BY_ONE),
        "zipf": (None, 1.5),
    },
}
SMALL: Sweeps = {"prefix": (512, 1024)}


def loads(device: str, sweeps: list[str] | None, small: bool) -> list[tuple[str, Any, Load]]:
    """(sweep, value, load), in order."""
    chosen = SMALL if small else SWEEPS[device]
    base = BASE[device]
    if small:
        base = base._replace(members=3)
    out = []
    for sweep, values in chosen.items():
        if sweeps is not None and sweep not in sweeps:
            continue
        for value in values:
            load = base._replace(**{sweep: value})
            if value == ONE_BY_ONE:  # fewer will do, and 64 would take minutes
                load = load._replace(members=min(4, load.members))
            out.append((sweep, value, load))
    return out


def measure(client: Client, model: Path, load: Load, seed: int, scratch: Path) -> dict[str, Any]:
    """The load once, with prompts of its own, its prefixes (and nothing else) in the cache."""
    client.flush()
    cold_ms = []
    for prefix in prefixes(model, load, seed, scratch):
        began = time.perf_counter()
        client.generate([*prefix, prefix[0]], 1)
        cold_ms.append((time.perf_counter() - began) * 1e3)
    before = counters(client)
    with Sampler(client) as sampler:
        result = bench_serving(client.base, model, load, seed=seed, scratch=scratch)
    after = counters(client)
    if result["completed"] != load.requests:
        errors = [error for error in result["errors"] if error]
        raise RuntimeError(f"{result['completed']} of {load.requests} requests came back: {errors[:1]}")
    moved = {name: after.get(name, 0) - before.get(name, 0) for name in MOVED}
    return {
        "cold_ttft_ms": median(cold_ms),
        "ttft_ms": result["median_ttft_ms"],
        "ttft_p99_ms": result["p99_ttft_ms"],
        "decode_step_ms": result["median_itl_ms"],  # between two tokens: the median has no other request's prefill
        "tpot_ms": result["median_tpot_ms"],  # a request's time without its first token, by the tokens: has them
        "tokens_per_s": result["output_throughput"],
        "hit_share": sum(result["cached_tokens"]) / sum(result["input_lens"]),
        "most_tokens_used": sampler.most,
        **moved,
        "ttfts_s": result["ttfts"],
        "duration_s": result["duration"],
    }


def warm_up(client: Client, device: str, model: Path, scratch: Path) -> None:
    """So that no load is charged with what is compiled at its first use."""
    measure(client, model, BASE[device]._replace(members=2, output=16), WARM_UP_SEED, scratch)


def row_of(arm: str, sweep: str, value: object, load: Load, raw: list[dict[str, Any]]) -> Row:
    """Medians and spreads of these rounds; a round may say at which start of its server it was measured."""
    names = [name for name in raw[0] if name not in ("ttfts_s", "start")]
    values = {name: [one[name] for one in raw] for name in names}
    starts = list(map(start_of, raw))
    return {
        "arm": arm,
        "sweep": sweep,
        "value": value,
        "load": load._asdict(),
        **{name: median(each) for name, each in values.items()},
        "spread": {name: spread_over_starts(each, starts) for name, each in values.items()},
        "raw": raw,
    }


def last_start(rows: Sequence[Row]) -> int:
    """The number of the last start of the servers that these rows have rounds of; 0 if there are none."""
    return max((start_of(one) for row in rows for one in row["raw"]), default=0)


def format_row(row: Row) -> str:
    return (
        f"{row['arm']:<14} {row['sweep']:>9} {row['value']!s:<11} TTFT {row['ttft_ms']:8.1f} ms "
        f"(cold {row['cold_ttft_ms']:.1f})  "
        f"step {row['decode_step_ms']:6.2f} ms  {row['tokens_per_s']:7.0f} tok/s  hits {row['hit_share']:.3f}  "
        f"used {row['most_tokens_used']:.0f}  maps {row['map_calls']:.0f}  unmaps {row['unmap_calls']:.0f}"
    )


@contextmanager
def server_of(args: argparse.Namespace, name: str, folder: Path) -> Iterator[tuple[Client, Path]]:
    """A client of the arm's server, given or started, and the model whose token ids it takes."""
    if args.urls:
        url = dict(entry.split("=", 1) for entry in args.urls)[name]
        client = Client(0)
        client.base = url.rstrip("/")
        yield client, args.model
        return
    with serving(name, args.device, folder) as client:
        yield client, model_for(args.device)


def rounds_of(rows: Sequence[Row], arm: str, load: Load) -> list[dict[str, Any]]:
    """What was measured of this load, for whichever sweep: the base load belongs to them all."""
    found = [row["raw"] for row in rows if row["arm"] == arm and row["load"] == load._asdict()]
    return list(max(found, key=len, default=[]))


def run_arm(args: argparse.Namespace, name: str, results: ResultFile, ends: float, scratch: Path) -> int:
    """Measure the rounds that the arm's rows lack, beginning none behind ``ends``. How many rows still lack some."""
    start, left = 1 + last_start([row for row in results.rows if row["arm"] == name]), 0
    with ExitStack() as stack:
        server: tuple[Client, Path] | None = None
        for sweep, value, load in progress(loads(args.device, args.sweeps, args.small), name):
            raw = rounds_of(results.rows, name, load)
            while len(raw) < args.rounds and time.monotonic() < ends:
                if server is None:
                    server = stack.enter_context(server_of(args, name, scratch))
                    warm_up(server[0], args.device, server[1], scratch)
                raw.append(measure(*server, load, 1 + len(raw), scratch) | {"start": start})
                results.add(row_of(name, sweep, value, load, raw))
            left += len(raw) < args.rounds
            if raw:
                results.add(row := row_of(name, sweep, value, load, raw))
                print(format_row(row), flush=True)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="default: all, or those of --urls")
    parser.add_argument("--urls", nargs="+", metavar="ARM=URL", help="servers that run already, instead of our own")
    parser.add_argument("--model", type=Path, help="with --urls: folder with the model's tokenizer")
    parser.add_argument("--sweeps", nargs="+", choices=list(SWEEPS["cuda"]), help="default: all")
    parser.add_argument("--rounds", type=int, help="default: 3, with --small 1")
    parser.add_argument("--small", action="store_true", help="one sweep of two loads")
    parser.add_argument("--resume", action="store_true", help="keep the rounds that --out has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so many")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.small else 3)
    out = args.out or RESULTS / {"cpu": "cpu", "cuda": "h200"}[args.device] / "prefix_hit.json"
    results = ResultFile(out, "prefix_hit", ["arm", "sweep", "value"], device=args.device, resume=args.resume)
    names = args.arms or ([entry.split("=", 1)[0] for entry in args.urls] if args.urls else list(ARMS))
    ends = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as scratch:
        left = sum(run_arm(args, name, results, ends, Path(scratch)) for name in names)
    if left:
        sys.exit(f"{left} rows are not measured in full after {args.seconds:.0f} s: --resume goes on with them")


if __name__ == "__main__":
    main()
