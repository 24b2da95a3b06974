# SPDX-License-Identifier: Apache-2.0
"""Requests of a Mooncake-format trace as token ids: equal block ids give equal tokens, nothing else does."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 512  # tokens that a block id stands for; the last block of a prompt may be cut
TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
ANSWERS = 1 << 40  # block ids of answers start here, above every id of a trace


class TraceRequest(NamedTuple):
    """A line of the trace."""

    number: int  # its line
    arrival_s: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.input_length + self.output_length


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests in order of time (the file's order where times are equal)."""
    requests = []
    with path.open() as lines:
        for index, line in enumerate(lines):
            if limit is not None and index >= limit:
                break
            entry = json.loads(line)
            blocks = tuple(entry["hash_ids"])
            if len(blocks) * BLOCK < entry["input_length"]:
                raise ValueError(f"{path}, line {index + 1}: too few blocks for {entry['input_length']} tokens")
            requests.append(
                TraceRequest(index, entry["timestamp"] / 1000, entry["input_length"], entry["output_length"], blocks)
            )
    return sorted(requests, key=lambda request: (request.arrival_s, request.number))


def tokens_of(blocks: Sequence[int], length: int, vocabulary: int = 1 << 31) -> array[int]:
    """The first ``length`` tokens of these blocks, each a fixed seeded list of 512 (splitmix64 of its position)."""
    with np.errstate(over="ignore"):
        x = np.asarray(blocks, dtype=np.uint64)[:, None] * np.uint64(BLOCK) + np.arange(BLOCK, dtype=np.uint64)
        x = x.reshape(-1)[:length] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    out = array("q")
    out.frombytes((x % np.uint64(vocabulary)).astype(np.int64).tobytes())
    return out


def prompt(request: TraceRequest, vocabulary: int = 1 << 31) -> array[int]:
    return tokens_of(request.blocks, request.input_length, vocabulary)


def answer(request: TraceRequest, vocabulary: int = 1 << 31) -> array[int]:
    """``output_length`` seeded tokens that are this request's alone."""
    first = ANSWERS + request.number * (1 << 12)  # room for 2 M tokens
    blocks = range(first, first - (-request.output_length // BLOCK))
    return tokens_of(blocks, request.output_length, vocabulary)


def ideal_hit_rate(requests: Sequence[TraceRequest]) -> float:
    """Token hit rate of a cache that forgets nothing, in whole blocks (0.374 for the conversation trace)."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        leading = 0
        for block in request.blocks:
            if block not in seen:
                break
            leading += 1
        hits += min(leading * BLOCK, request.input_length)
        total += request.input_length
        seen.update(request.blocks)
    return hits / total if total else 0.0


def fitting(requests: Sequence[TraceRequest], pool_tokens: int, page: int = 128) -> Iterator[TraceRequest]:
    """Those that fit the pool in whole pages of the largest page size compared: the same for every arm."""
    for request in requests:
        if -(-request.total // page) + 1 <= pool_tokens // page:
            yield request
