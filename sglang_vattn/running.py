# SPDX-License-Identifier: Apache-2.0
"""Hooks into a batch's way through the scheduler: its allocation, and the moment before its forward."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.tree_cache import VattnTreeCache

POISON = os.environ.get("VATTN_TEST_POISON") == "1"


def alloc_for_extend(original: Callable[..., Any], batch: Any, *a: Any, **kw: Any) -> Any:
    """Around ``allocation.alloc_for_extend``: say whose pages are taken, then ask for them to be mapped."""
    allocator = batch.token_to_kv_pool_allocator
    if not isinstance(allocator, VattnAllocator):
        return original(batch, *a, **kw)
    with allocator.allocating_for(batch.reqs):
        result = original(batch, *a, **kw)
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
        # SGLang leaves the match's value standing when SGLANG_RADIX_FORCE_MISS drops the match itself.
        req.kv.cache_protected_len = allocator.requests[req.kv.req_pool_idx].shared * allocator.page_size
        _grow(allocator, req, length)
    return result


def alloc_for_decode(original: Callable[..., Any], batch: Any, *a: Any, **kw: Any) -> Any:
    """Around ``allocation.alloc_for_decode``: as for extend, for the requests that begin a new page."""
    allocator = batch.token_to_kv_pool_allocator
    if not isinstance(allocator, VattnAllocator):
        return original(batch, *a, **kw)
    crossing = allocator.page_crossings(batch.seq_lens_cpu + 1)
    with allocator.allocating_for(batch.reqs, pages_needed=len(crossing)):
        result = original(batch, *a, **kw)
    lengths = batch.seq_lens_cpu + 1
    for index in {*crossing, *allocator.page_crossings(lengths + allocator.get_kvcache().read_ahead)}:
        _grow(allocator, batch.reqs[index], int(lengths[index]))
    return result


def _grow(allocator: VattnAllocator, req: Any, length: int) -> None:
    request = allocator.requests[req.kv.req_pool_idx]
    allocator.ahead.reserve(request, length)
    if not request.row_deferred:
        allocator.rows.grow(request)


def before_forward(self: Any, batch: Any, *a: Any, **kw: Any) -> None:
    """Before ``TpModelWorker.forward_batch_*``, on the stream that the model is about to run on.

    Everything that must be ordered with the forward happens here: the partial copies (on the scheduler's stream
    they would race with forwards in flight), the row table, the decision how this batch reads.
    """
    allocator = getattr(batch, "token_to_kv_pool_allocator", None)
    if not isinstance(allocator, VattnAllocator):
        return
    if POISON:
        allocator.get_kvcache().poison(allocator.pages.free_list()[: allocator.pages.free - allocator.pages.reserved])
    allocator.get_kvcache().flush()
    allocator.ahead.keep(allocator.requests.values())
    slots = batch.req_pool_indices_cpu
    found = [] if slots is None else [allocator.requests.get(slot) for slot in slots.tolist()]
    # A request that is gone (its last forward overlaps its release) has no row left: the batch reads by pages.
    requests = [request for request in found if request is not None]
    if len(requests) < len(found):
        requests = []
    allocator.reading.plan(requests, decode=batch.forward_mode.is_decode())
    allocator.rows.before_forward()  # after the plan, which may give a request its row


def touch_waiting_prefix(original: Callable[..., None], req: Any, tree_cache: Any) -> None:
    """Around ``common.touch_waiting_prefix``, whose key does not tell the LoRA id and the extra key apart."""
    if isinstance(tree_cache, VattnTreeCache):
        tree_cache.touch(req)
    else:
        original(req, tree_cache)
