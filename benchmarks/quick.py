# SPDX-License-Identifier: Apache-2.0
"""All arms' servers side by side on one device: a window of the trace and the prefix-hit loads, in a few minutes.

    python -m benchmarks.quick --device cuda --seconds 200

The servers start at the same time, with a smaller pool each, and are measured in turns, the others idle. The loads come
first, round by round, as many as begin within ``--seconds``; then the trace, on one server after the other. Rows have
the form of `prefix_hit` and `trace_replay`, which take longer: one server at a time, with all memory. With ``--add``
the rounds of the loads join those that the result has from other starts of the servers, so that a row's spread has what
differs from start to start.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import prefix_hit
from benchmarks.arms import ARMS, all_serving, model_for
from benchmarks.common import RESULTS, ResultFile
from benchmarks.live import replay, result_file
from benchmarks.prefix_hit import BASE, ONE_BY_ONE, Load
from benchmarks.trace import TRACE, read_trace

Loads = tuple[tuple[str, Any, Load], ...]  # sweep, value, load


def quick_loads(device: str) -> Loads:
    """What of the sweeps fits a small pool and takes seconds."""
    base = BASE[device]
    lone = base._replace(arrival=ONE_BY_ONE, members=1)
    if device == "cpu":
        return (("prefix", 512, base._replace(prefix=512)), ("arrival", ONE_BY_ONE, lone))
    return (
        *(("prefix", tokens, base._replace(prefix=tokens)) for tokens in (512, 2048, 8192)),
        ("prefix", 32768, base._replace(prefix=32768, prefixes=2, members=8)),
        ("members", 1, base._replace(members=1, prefixes=8)),
        ("own", 256, base._replace(own=256)),
        ("arrival", ONE_BY_ONE, lone),
    )


def skipped(arm: str, sweep: str, number: int) -> bool:
    """Without hits a load is mostly prefill, and takes as long as all others: one sweep, one round a start."""
    return arm == "stock_no_hits" and (sweep != "prefix" or number >= 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no load after so many, all rounds together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="to the rounds that the result of the loads has")
    parser.add_argument("--trace", type=Path, default=TRACE, help="skipped if there is no such file")
    parser.add_argument("--trace-start", type=float, default=600.0, help="seconds into the trace")
    parser.add_argument("--trace-seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path, help="folder; default: that of the results")
    args = parser.parse_args()
    out = args.out or RESULTS / {"cpu": "cpu", "cuda": "h200"}[args.device]
    loads, model = quick_loads(args.device), model_for(args.device)
    with tempfile.TemporaryDirectory() as scratch, all_serving(args.arms, args.device, Path(scratch)) as clients:
        for client in clients.values():
            prefix_hit.warm_up(client, args.device, model, Path(scratch))
        key = ["arm", "sweep", "value"]
        results = ResultFile(out / "prefix_hit.json", "quick", key, device=args.device, resume=args.add)
        raw: dict[tuple[str, str, Any], list[dict[str, Any]]] = {
            (row["arm"], row["sweep"], row["value"]): row["raw"] for row in results.rows
        }
        start = 1 + prefix_hit.last_start(results.rows)
        began = time.monotonic()
        for number in range(args.rounds):
            for sweep, value, load in loads:
                for name, client in clients.items():
                    if skipped(name, sweep, number) or time.monotonic() - began > args.seconds:
                        continue
                    rounds = raw.setdefault((name, sweep, value), [])
                    seed = start * 1000 + number  # the same prompts for all arms
                    measured = prefix_hit.measure(client, model, load, seed, Path(scratch))
                    rounds.append(measured | {"start": start})
                    results.add(row := prefix_hit.row_of(name, sweep, value, load, rounds))
                    print(prefix_hit.format_row(row), flush=True)
        if args.trace.exists():
            results = result_file(out / "trace_live.json", "quick", args.device)
            requests = read_trace(args.trace)
            for name, client in clients.items():
                client.flush()
                if not replay(_window(args, name, client.base), requests, results):
                    break


def _window(args: argparse.Namespace, name: str, url: str) -> argparse.Namespace:
    """What `live.replay` asks for. The tiny model of the host knows fewer tokens and shorter requests."""
    tiny = args.device == "cpu"
    return argparse.Namespace(
        name=name, url=url, start=args.trace_start, seconds=args.trace_seconds, speed=1.0,
        longest=4000 if tiny else 32768, vocabulary=300 if tiny else 32000,
    )  # fmt: skip


if __name__ == "__main__":
    main()
