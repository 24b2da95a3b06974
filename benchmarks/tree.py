# SPDX-License-Identifier: Apache-2.0
"""The prefix tree alone: ours against SGLang's default tree (UnifiedRadixCache, Rust core, page size 1).

    python -m benchmarks.tree

``match`` finds a cached sequence of so many tokens. ``hit`` also gives the slots of all its tokens, as a scheduler
asks for them at admission. ``insert`` caches a sequence that the tree does not know, ``append`` one of which it lacks
the last 256 tokens. ``split`` matches half of a node that holds the sequence whole. Both trees hold 64 other sequences
of a tenth of the length. The arms take turns; figures are medians of the thread's CPU time in microseconds, the spread
is the distance of the quartiles over the median.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from benchmarks.common import RESULTS, ResultFile, Row, median, progress, quartile_spread
from benchmarks.dry import Vattn
from benchmarks.dry_stock import Stock
from benchmarks.trace import tokens_of

LENGTHS = (8192, 65536, 131072)
OPERATIONS = ("match", "hit", "insert", "append", "split")
OTHERS = 64
TAIL = 256


def sequence(number: int, length: int) -> array[int]:
    first = number << 20
    return tokens_of(range(first, first - (-length // 512)), length)


class Ours:
    """Our tree behind SGLang's contract."""

    def __init__(self, room: int) -> None:
        self.arm = Vattn(room, 1024)
        self.tree, self.pages = self.arm.tree.tree, self.arm.allocator.pages

    def insert(self, tokens: array[int]) -> Callable[[], object]:
        pages = self.pages.take(-(-len(tokens) // self.arm.page_size))
        assert pages is not None

        def call() -> None:
            self.tree.insert(tokens, pages)
            self.pages.release(pages)

        return call

    def match(self, tokens: array[int], limit: int) -> Any:
        return self.tree.match(tokens, None, limit)

    def hit(self, tokens: array[int], limit: int) -> Any:
        length, node = self.tree.match(tokens, None, limit)
        return self.arm.allocator.slots(self.tree.path_pages(node, length), 0, length)

    def reset(self) -> None:
        self.tree.reset()

    def close(self) -> None:
        self.arm.close()


class Theirs:
    """Stock's tree at page size 1."""

    def __init__(self, room: int) -> None:
        self.arm = Stock(room, room, 1)

    def insert(self, tokens: array[int]) -> Callable[[], object]:
        values = self.arm.slots[: len(tokens)].clone()
        return lambda: self.arm.tree.insert(InsertParams(key=RadixKey(tokens, None), value=values))

    def match(self, tokens: array[int], limit: int) -> Any:
        return self.arm.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None, limit=limit)))

    def hit(self, tokens: array[int], limit: int) -> Any:
        result = self.match(tokens, limit)
        return self.arm.tree.path_device_indices(result.last_device_node)

    def reset(self) -> None:
        self.arm.tree.reset()

    def close(self) -> None:
        self.arm.close()


def prepare(tree: Any, operation: str, length: int, others: list[array[int]]) -> Callable[[], object]:
    """Bring a tree to where the operation starts; the operation itself."""
    tokens = sequence(0, length)
    if operation in ("match", "hit"):  # nothing to undo between two rounds
        call = tree.match if operation == "match" else tree.hit
        return lambda: call(tokens, length)
    tree.reset()
    for other in others:
        tree.insert(other)()
    if operation == "insert":
        return tree.insert(tokens)  # type: ignore[no-any-return]
    if operation == "append":
        tree.insert(tokens[:-TAIL])()
        return tree.insert(tokens)  # type: ignore[no-any-return]
    tree.insert(tokens)()
    return lambda: tree.match(tokens, length // 2)


def measure(operation: str, length: int, rounds: int) -> Row:
    others = [sequence(1 + number, length // 10) for number in range(OTHERS)]
    room = 2 * (length + sum(map(len, others))) + 128 * (OTHERS + 2)
    arms: dict[str, Any] = {"stock": Theirs(room), "vattn": Ours(room)}
    raw: dict[str, list[float]] = {name: [] for name in arms}
    for tree in arms.values():
        for tokens in [*others, sequence(0, length)]:
            tree.insert(tokens)()
    for number in range(rounds + 2):
        for name, tree in arms.items():
            call = prepare(tree, operation, length, others)
            start = time.thread_time()
            call()
            if number >= 2:
                raw[name].append((time.thread_time() - start) * 1e6)
    for tree in arms.values():
        tree.close()
    us = {name: median(values) for name, values in raw.items()}
    return {
        "operation": operation,
        "tokens": length,
        "us": us,
        "speedup": us["stock"] / us["vattn"],
        "spread": {name: quartile_spread(values) for name, values in raw.items()},
        "raw": raw,
    }


def format_row(row: Row) -> str:
    us, spread = row["us"], row["spread"]
    return (
        f"{row['operation']:<8} {row['tokens']:>7,} tokens  "
        f"stock {us['stock']:9.1f} us (spread {spread['stock']:.2f})  "
        f"vattn {us['vattn']:9.1f} us ({spread['vattn']:.2f})  x{row['speedup']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu" / "tree.json")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    args = parser.parse_args()
    results = ResultFile(args.out, "tree", ["operation", "tokens"], resume=args.resume)
    todo = [(operation, length) for length in args.lengths for operation in OPERATIONS]
    for operation, length in progress(todo, "tree"):
        if not results.has(operation=operation, tokens=length):
            row = measure(operation, length, args.rounds)
            results.add(row)
            print(format_row(row), flush=True)


if __name__ == "__main__":
    main()
