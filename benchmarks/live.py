# SPDX-License-Identifier: Apache-2.0
"""A window of a trace against a live server, at its own arrival times or faster."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ResultFile, Row, median, quartile_spread
from benchmarks.trace import TraceRequest, prompt

LIMIT_S = 600.0


@dataclass
class Sent:
    """What came back for one request."""

    arrival_s: float
    input_length: int
    output_length: int
    late_s: float = 0.0  # behind its time when it was sent
    ttft_s: float = 0.0
    finish_s: float = 0.0
    cached_tokens: int = 0
    error: str = ""

    @property
    def step_ms(self) -> float:
        """Of a decode step; arrivals of single tokens say more of the network than of the server."""
        return (self.finish_s - self.ttft_s) / (self.output_length - 1) * 1e3


def window(args: argparse.Namespace, requests: Sequence[TraceRequest]) -> tuple[list[TraceRequest], int]:
    """The requests of the window that are short enough, and how many are not."""
    inside = [r for r in requests if args.start <= r.arrival_s < args.start + args.seconds]
    fits = [r for r in inside if r.total <= args.longest and r.output_length > 0]
    return fits, len(inside) - len(fits)


async def _one(session: Any, url: str, request: TraceRequest, sent: Sent, vocabulary: int) -> None:
    ids = prompt(request, vocabulary).tolist()
    sampling = {"temperature": 0, "max_new_tokens": request.output_length, "ignore_eos": True}
    began, tokens = time.perf_counter(), 0
    try:
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            async for raw in response.content:
                line = raw.strip()
                if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                    continue
                meta = json.loads(line[5:])["meta_info"]
                if tokens == 0:
                    sent.ttft_s = time.perf_counter() - began
                    sent.cached_tokens = meta.get("cached_tokens", 0)
                tokens = meta["completion_tokens"]
        sent.finish_s = time.perf_counter() - began
    except Exception as error:  # one lost request must not end the run; it is counted
        sent.error = repr(error)


async def _all(args: argparse.Namespace, requests: Sequence[TraceRequest], sent: list[Sent]) -> None:
    import aiohttp
    from tqdm import tqdm

    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as session:
        began, tasks = time.perf_counter(), []
        with tqdm(total=len(requests), desc="sent", leave=False, disable=not sys.stderr.isatty()) as bar:
            for request in requests:
                due = (request.arrival_s - args.start) / args.speed
                await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
                one = Sent(request.arrival_s, request.input_length, request.output_length)
                one.late_s = time.perf_counter() - began - due
                sent.append(one)
                tasks.append(asyncio.create_task(_one(session, args.url, request, one, args.vocabulary)))
                bar.update()
            await asyncio.gather(*tasks)


def result_file(out: Path, module: str, device: str) -> ResultFile:
    """Where the rows of all arms and windows come together."""
    return ResultFile(out, module, ["arm", "start_s", "seconds", "speed"], device=device, resume=True)


def replay(args: argparse.Namespace, requests: Sequence[TraceRequest], results: ResultFile) -> bool:
    """Send the window to ``args.url``. False if the run was stopped; what has come back is kept."""
    chosen, skipped = window(args, requests)
    sent: list[Sent] = []
    whole = True
    began = time.perf_counter()
    try:
        asyncio.run(_all(args, chosen, sent))
    except KeyboardInterrupt:
        whole = False
        print(f"stopped after {len(sent)} of {len(chosen)} requests")
    row = summary(args, sent, skipped, time.perf_counter() - began)
    results.add(row)
    print(
        f"{row['arm']}: {row['answered']} of {row['requests']} answered, hits {row['hit_rate']:.4f}, "
        f"TTFT {row['ttft_ms']:.1f} ms, step {row['decode_step_ms']:.2f} ms, {row['tokens_per_s']:.0f} tok/s"
    )
    return whole


def summary(args: argparse.Namespace, sent: Sequence[Sent], skipped: int, seconds: float) -> Row:
    done = [one for one in sent if one.finish_s and not one.error]
    ttfts = [one.ttft_s * 1e3 for one in done] or [0.0]
    steps = [one.step_ms for one in done if one.output_length > 1] or [0.0]
    return {
        "arm": args.name,
        "start_s": args.start,
        "seconds": args.seconds,
        "speed": args.speed,
        "requests": len(sent),
        "answered": len(done),
        "skipped": skipped,
        "errors": sorted({one.error for one in sent if one.error})[:5],
        "hit_rate": sum(one.cached_tokens for one in done) / max(1, sum(one.input_length for one in done)),
        "ttft_ms": median(ttfts),
        "ttft_p99_ms": sorted(ttfts)[int(0.99 * (len(ttfts) - 1))],
        "decode_step_ms": median(steps),
        "tokens_per_s": sum(one.output_length for one in done) / seconds,
        "latest_s": max((one.late_s for one in sent), default=0.0),
        "spread": {"ttft_ms": quartile_spread(ttfts), "decode_step_ms": quartile_spread(steps)},
        "raw": {
            name: [getattr(one, name) for one in sent]
            for name in ("arrival_s", "input_length", "output_length", "ttft_s", "finish_s", "cached_tokens")
        },
    }
