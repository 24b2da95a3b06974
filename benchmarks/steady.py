# SPDX-License-Identifier: Apache-2.0
"""Steady state on one GPU: 8 documents of 8k, 64 requests at once, for as long as several lives of every row.

    python -m benchmarks.steady --out benchmarks/results/h200/steady.json

A request starts when another ends, so that prefill, decode, admission and release overlap as in production. The
number of rows is capped (`--rows`), and the requests are at least four times as many, so that every row is used,
released, unmapped and used again. Both arms run the same engine arguments as `serve_ab.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.serve_ab import ARMS, TABLE_ARMS, Arm, heading, write_model
from sglang_vattn.geometry import STRIPES

SHOWN = ("map_calls", "unmap_calls", "batches_waited", "batches_shared", "batches_rows", "batches_pages")
DOCUMENTS, DOCUMENT_TOKENS, QUESTION, OUTPUT, AT_ONCE = 8, 8192, 64, 128, 64


async def one_request(arm: Arm, prompt: list[int], times: list[dict[str, float]]) -> None:
    start = time.perf_counter()
    first = 0.0
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    stream = await arm.engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
    async for _ in stream:
        first = first or time.perf_counter()
    end = time.perf_counter()
    times.append({"ttft_s": first - start, "step_s": (end - first) / (OUTPUT - 1), "end": end})


async def drive(arm: Arm, requests: int) -> dict[str, Any]:
    documents = [arm.tokens(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    prompts = iter([documents[i % DOCUMENTS] + arm.tokens(QUESTION) for i in range(requests)])
    times: list[dict[str, float]] = []

    async def worker() -> None:
        for prompt in prompts:
            await one_request(arm, prompt, times)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    seconds = time.perf_counter() - start
    settled = sorted(times, key=lambda each: each["end"])[AT_ONCE:-AT_ONCE]  # neither the start nor the end
    return {
        "arm": arm.name,
        "requests": requests,
        "seconds": seconds,
        "out_tok_s": requests * OUTPUT / seconds,
        "ttft_ms": statistics.median(each["ttft_s"] for each in settled) * 1e3,
        "decode_step_ms": statistics.median(each["step_s"] for each in settled) * 1e3,
        "raw": times,
    }


def measure(arm: Arm, requests: int) -> dict[str, Any]:
    before = arm.counters()
    row: dict[str, Any] = arm.engine.loop.run_until_complete(drive(arm, requests))  # the engine's sockets belong to it
    return row | {"counters": {key: value - before.get(key, 0) for key, value in arm.counters().items()}}


def lost_to_mapping(row: dict[str, Any]) -> float:
    """Share of the run that the GPU stood still or ran slower for mappings, by the costs in docs/benchmarks.md."""
    counters = row["counters"]
    stall_s = counters.get("unmap_calls", 0) * STRIPES * 220e-6 + counters.get("pages_mapped", 0) * 6e-6
    return float(stall_s / row["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="steady.json")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--arms", nargs="+", default=TABLE_ARMS, choices=list(ARMS))
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        extra = {"vattn_rows": args.rows} if "kv_backend" in ARMS[args.arm] else {}
        arm = Arm(args.arm, args.model, 1, extra)
        measure(arm, 3 * AT_ONCE)  # warm-up
        Path(args.out).write_text(json.dumps(measure(arm, args.requests)))
        arm.engine.shutdown()
        return
    result = heading("steady", ["arm"])
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(scratch)
        for name in args.arms:
            part = Path(scratch, f"{name}.json")
            command = [sys.executable, "-m", "benchmarks.steady", *sys.argv[1:], "--arm", name]
            command += ["--model", str(model), "--out", str(part)]
            done = subprocess.run(command, capture_output=True, text=True)
            if not part.exists():
                print(f"{name}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
                continue
            row = json.loads(part.read_text())
            result["rows"].append(row)
            Path(args.out).write_text(json.dumps(result, indent=1))
            calls = {key: row["counters"].get(key, 0) for key in SHOWN}
            print(
                f"{name:<14} {row['out_tok_s']:7.0f} tok/s  step {row['decode_step_ms']:6.2f} ms  "
                f"TTFT {row['ttft_ms']:6.1f} ms  lost to mapping {lost_to_mapping(row):.2%}  {calls}"
            )


if __name__ == "__main__":
    main()
