# SPDX-License-Identifier: Apache-2.0
"""What users see of the pool: the ``vattn`` part of ``/server_info``, and each answer's ``meta_info``."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_vattn.allocator import VattnAllocator


def facts(allocator: VattnAllocator) -> dict[str, int]:
    """The pool's state as plain integers."""
    pages, pool, reading = allocator.pages, allocator.get_kvcache(), allocator.reading
    return {
        "page_size": allocator.page_size,
        "page_bytes": pool.geometry.page_bytes,
        "token_bytes": pool.geometry.token_bytes,
        "physical_bytes": pool.space.physical_bytes,
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
        **reading.counters,
        "num_rows": pool.space.num_rows,
        "row_tokens": pool.row_tokens,
        **pool.space.stats(),
        **allocator.rows.stats(),
    }


def add_internal_state(result: Any, self: Any, *a: Any, **kw: Any) -> None:
    """After ``SchedulerInternalStateController.get_internal_state``."""
    allocator = self.scheduler.token_to_kv_pool_allocator
    if isinstance(allocator, VattnAllocator):
        result.internal_state["vattn"] = facts(allocator)


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
