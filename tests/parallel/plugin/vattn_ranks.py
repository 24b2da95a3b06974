# SPDX-License-Identifier: Apache-2.0
"""A SGLang plugin for tests: each rank writes down what it decided, a line a forward.

A server with this folder in PYTHONPATH loads it where SGLANG_PLUGINS names `ranks`. It hooks nothing of SGLang: it
wraps methods of the plugin under test once that has been installed.

`VATTN_TRACE`
    A folder; rank r writes `rank<r>.jsonl` there.
`VATTN_RANK_ENVIRONMENT`
    A JSON list, for each rank the environment variables that it alone gets before it opens its driver.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Trace:
    """What one rank decided. `decided` must be equal on all ranks at each forward; `timing` may not be."""

    def __init__(self, allocator: Any, path: Path) -> None:
        self.allocator, self.path = allocator, path
        self.matched: list[tuple[int, int]] = []  # (tokens asked for, tokens that hit), since the last forward
        self.evicted = 0

    def write(self, requests: list[Any], decode: bool, ready_here: int) -> None:
        allocator, tree, reading = self.allocator, self.allocator.tree_cache, self.allocator.reading
        pages = [(r.slot, r.shared, r.copied_tokens, r.needed, r.pages, r.ahead) for r in requests]
        decided = {
            "decode": decode,
            "requests": len(requests),
            "pages_and_hits": hashlib.sha1(repr(pages).encode()).hexdigest(),
            "matched": hashlib.sha1(repr(self.matched).encode()).hexdigest(),
            "hits": [allocator.hit_tokens, allocator.pages_aliased, allocator.tokens_copied],
            "evicted": self.evicted,
            "told": [allocator.available_size(), tree.evictable_size(), tree.protected_size(), tree.total_size()],
            "reserved": allocator.pages.reserved,
            "variant": reading.variant,
            "by_rows": reading.by_rows,
            "groups": [[group.members, group.node.end] for group in reading.groups],
        }
        timing = {"ready_here": ready_here, "mapped": allocator.rows.space.stats()["pages_mapped"]}
        with self.path.open("a") as out:
            out.write(json.dumps({"decided": decided, "timing": timing}) + "\n")
        self.matched.clear()


def _rank() -> int:
    from sglang.srt.distributed import get_tp_group

    return int(get_tp_group().rank_in_group)


def _wrap() -> None:
    building, pool, reading, tree = (
        importlib.import_module(f"sglang_vattn.{name}") for name in ("building", "pool", "reading", "tree_cache")
    )
    reading_class: Any = reading.Reading
    tree_class: Any = tree.VattnTreeCache
    of_ranks = json.loads(os.environ.get("VATTN_RANK_ENVIRONMENT", "[]"))
    open_driver, build = pool.open_driver, building.VattnAllocator
    plan, match, evict = reading_class.plan, tree_class.match_prefix, tree_class.evict_pages
    traces: list[Trace] = []

    def open_with_environment(*a: Any) -> Any:
        os.environ.update(of_ranks[_rank()] if of_ranks else {})
        return open_driver(*a)

    def build_and_trace(*a: Any, **kw: Any) -> Any:
        allocator = build(*a, **kw)
        traces.append(Trace(allocator, Path(os.environ["VATTN_TRACE"], f"rank{_rank()}.jsonl")))
        return allocator

    def plan_and_trace(self: Any, requests: list[Any], *, decode: bool) -> None:
        ready = sum(map(self.rows.ready, requests))
        plan(self, requests, decode=decode)
        traces[-1].write(requests, decode, ready)

    def match_and_trace(self: Any, params: Any) -> Any:
        result = match(self, params)
        traces[-1].matched.append((len(params.key), result.device_prefix_len))
        return result

    def evict_and_trace(self: Any, num_pages: int) -> int:
        freed: int = evict(self, num_pages)
        traces[-1].evicted += freed
        return freed

    vars(pool)["open_driver"] = open_with_environment
    if "VATTN_TRACE" in os.environ:
        vars(building)["VattnAllocator"] = build_and_trace
        reading_class.plan = plan_and_trace
        tree_class.match_prefix = match_and_trace
        tree_class.evict_pages = evict_and_trace


def register() -> None:
    """After the plugin under test has installed its hooks, which it does once the flag is known."""
    from sglang_vattn import plugin

    install: Callable[[], None] = plugin.install
    done: list[bool] = []

    def install_and_wrap() -> None:
        install()
        if not done:
            done.append(True)
            _wrap()

    plugin.install = install_and_wrap
