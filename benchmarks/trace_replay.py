# SPDX-License-Identifier: Apache-2.0
"""A real conversation trace through the prefix cache: simulated without a model, or against a live server.

    python -m benchmarks.trace_replay --simulate
    python -m benchmarks.trace_replay --url http://127.0.0.1:30000 --start 600 --seconds 300 --speed 2
    python -m benchmarks.trace_replay --serve vattn --device cuda --seconds 120

The trace (Mooncake, FAST'25) names each prompt's 512-token blocks; each id becomes a fixed seeded block, so sharing is
exact. Simulated, requests go one at a time in order of time and leave prompt and answer in the cache; those that do
not fit the smallest form of the pool are skipped, the same in every arm.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ResultFile, Row, progress
from benchmarks.trace import TRACE, TraceRequest, answer, fitting, ideal_hit_rate, prompt, read_trace

POOLS = (100_000, 400_000, 850_000, 3_000_000)
ARMS = ("vattn", "stock_page1", "stock_page16", "stock_page64", "stock_page128")
SAMPLE_EVERY = 100  # requests between two looks at what is wasted


def build(name: str, pool_tokens: int, longest: int) -> Any:
    from benchmarks.dry import Vattn
    from benchmarks.dry_stock import Stock

    if name.startswith("stock_page"):
        return Stock(pool_tokens, longest, int(name.removeprefix("stock_page")))
    if name != "vattn":
        raise ValueError(f"arm {name!r}: choose vattn or stock_page<n>")
    return Vattn(pool_tokens, longest)


def simulate(name: str, pool_tokens: int, requests: Sequence[TraceRequest]) -> Row:
    """Replay the requests that fit through one arm; its row of the result."""
    fits = list(fitting(requests, pool_tokens))
    longest = max((request.total for request in fits), default=0)
    wasted: list[float] = []
    began = time.perf_counter()
    with closing(build(name, pool_tokens, longest)) as arm:
        totals = arm.totals
        for request in progress(fits, f"{name}, {pool_tokens} tokens"):
            hit = arm.run(prompt(request) + answer(request), request.input_length)
            totals.requests += 1
            totals.prompt_tokens += request.input_length
            totals.hit_tokens += hit
            if totals.requests % SAMPLE_EVERY == 0:
                wasted.append(arm.wasted_tokens() / pool_tokens)
        cpu_s = totals.match_s + totals.prefill_s + totals.decode_s + totals.finish_s
        return {
            "arm": name,
            "pool_tokens": pool_tokens,
            "skipped": len(requests) - len(fits),
            "hit_rate": totals.hit_tokens / totals.prompt_tokens,
            "ideal_hit_rate": ideal_hit_rate(fits),
            "wasted_share": sum(wasted) / len(wasted) if wasted else 0.0,
            "cached_tokens": arm.cached_tokens(),
            "cpu_us_per_request": cpu_s / totals.requests * 1e6,
            "replay_s": time.perf_counter() - began,
            **arm.row(),
        }


def format_row(row: Row) -> str:
    extra = f"  maps {row['map_calls']} unmaps {row['unmap_calls']}" if "map_calls" in row else ""
    return (
        f"{row['arm']:<14} pool {row['pool_tokens']:>9,}  "
        f"hits {row['hit_rate']:.5f} (ideal {row['ideal_hit_rate']:.4f})  "
        f"wasted {row['wasted_share']:.2%}  copied {row['tokens_copied']:,}  evicted {row['tokens_evicted']:,}  "
        f"skipped {row['skipped']}  {row['cpu_us_per_request']:.0f} us a request  {row['replay_s']:.0f} s{extra}"
    )


def cells(args: argparse.Namespace, results: ResultFile) -> Iterator[tuple[str, int]]:
    for pool in args.pools:
        for name in args.arms:
            if not results.has(arm=name, pool_tokens=pool):
                yield name, pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="without a model or a server")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--limit", type=int, help="only the first so many lines of the trace")
    parser.add_argument("--out", type=Path, help="default: trace_replay.json or trace_live.json with the results")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--pools", type=int, nargs="+", default=list(POOLS), help="simulated: tokens")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="simulated")
    parser.add_argument("--url", help="live: the server")
    parser.add_argument("--serve", help="live: start this arm's server (see prefix_hit.py) instead")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="live: with --serve")
    parser.add_argument("--name", default="server", help="live: what to call it in the result")
    parser.add_argument("--start", type=float, default=0.0, help="live: seconds into the trace")
    parser.add_argument("--seconds", type=float, default=60.0, help="live: length of the window, in the trace's time")
    parser.add_argument("--speed", type=float, default=1.0, help="live: how much faster than the trace")
    parser.add_argument("--longest", type=int, default=32768, help="live: skip requests of more tokens than this")
    parser.add_argument("--vocabulary", type=int, default=32000, help="live: token ids are below this")
    args = parser.parse_args()
    requests = read_trace(args.trace, args.limit)
    if args.simulate:
        out = args.out or RESULTS / "cpu" / "trace_replay.json"
        results = ResultFile(out, "trace_replay", ["arm", "pool_tokens"], resume=args.resume)
        for name, pool in cells(args, results):
            row = simulate(name, pool, requests)
            results.add(row)
            print(format_row(row), flush=True)
    elif args.url or args.serve:
        from benchmarks.live import replay, result_file

        out = args.out or RESULTS / {"cpu": "cpu", "cuda": "h200"}[args.device] / "trace_live.json"
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            if args.serve:
                from benchmarks.arms import serving

                args.url = stack.enter_context(serving(args.serve, args.device, Path(scratch))).base
                args.name = args.serve
                if args.device == "cpu":  # the tiny model
                    args.vocabulary, args.longest = 300, min(args.longest, 4000)
            replay(args, requests, result_file(out, "trace_replay", args.device))
    else:
        parser.error("one of --simulate, --url, --serve")


if __name__ == "__main__":
    main()
