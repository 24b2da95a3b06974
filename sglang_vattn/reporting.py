# SPDX-License-Identifier: Apache-2.0
"""The pool's facts, which all views show (see :mod:`sglang_vattn.observe`), and each answer's ``meta_info``."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_vattn.allocator import VattnAllocator


def facts(allocator: VattnAllocator) -> dict[str, int]:
    """The pool's state as plain integers, O(1). ``Observer.facts`` adds what needs the running requests."""
    pages, pool, reading = allocator.pages, allocator.get_kvcache(), allocator.reading
    space, tree = pool.space, allocator.tree_cache
    stats, page_bytes = space.stats(), pool.geometry.page_bytes
    return {
        "page_size": allocator.page_size,
        "page_bytes": page_bytes,
        "token_bytes": pool.geometry.token_bytes,
        "physical_bytes": space.physical_bytes,
        "num_pages": pages.num_pages,
        "free": pages.free,
        "private": pages.private,
        "evictable": pages.evictable,
        "protected": pages.protected,
        "requests": len(allocator.requests),
        "hit_tokens": allocator.hit_tokens,
        "pages_aliased": allocator.pages_aliased,
        "tokens_copied": allocator.tokens_copied,
        "reserved": pages.reserved,
        "guard_pages": 1,
        "padding_pages": 1,
        "virtual_bytes": space.physical_bytes + space.num_rows * space.pages_per_row * page_bytes,
        "aliased_bytes": stats["mappings"] * page_bytes,
        "aliased_tokens": allocator.pages_aliased * allocator.page_size,
        "copied_tokens": allocator.tokens_copied,
        "pages_scrubbed": allocator.scrub.pages_scrubbed,
        "tokens_saved": reading.counters["pages_saved"] * allocator.page_size,
        "cached_tokens": tree.tree.num_tokens if tree is not None else 0,
        "tree_nodes": tree.tree.num_nodes if tree is not None else 0,
        "evicted_pages": tree.evicted_pages if tree is not None else 0,
        **reading.counters,
        "num_rows": space.num_rows,
        "row_tokens": pool.row_tokens,
        **stats,
        **allocator.rows.stats(),
    }


class VattnOutputStreamer(SchedulerOutputStreamer):
    """Adds to a finished request's ``meta_info`` what its hit was made of.

    ``vattn_pages_aliased`` and ``vattn_tokens_copied`` are lists of one number (SGLang's form for such fields).
    """

    __slots__ = ()
    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        if not any(req.finished() for req in reqs):
            return {}
        hits = self.tree_cache.token_to_kv_pool_allocator.hits
        found = [hits.pop(req.rid, (0, 0)) if req.finished() else None for req in reqs]
        return {
            "vattn_pages_aliased": [[] if hit is None else [hit[0]] for hit in found],
            "vattn_tokens_copied": [[] if hit is None else [hit[1]] for hit in found],
        }


def output_streamer_class(result: type, self: Any) -> type:
    """After ``Scheduler.get_output_streamer_class``; SGLang's Rust egress takes no additional fields."""
    if isinstance(self.token_to_kv_pool_allocator, VattnAllocator) and self.rust_server is None:
        return VattnOutputStreamer
    return result
