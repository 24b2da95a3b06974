# SPDX-License-Identifier: Apache-2.0
"""Our arm of the simulated replay: the caches of a server without its model, one request at a time.

The plugin's own tree cache, allocator, page counters, row table and mapper, driven through the same calls as by
SGLang's scheduler; its pages are 4 KiB of host memory in place of 16 MiB of the GPU's. Stock's is dry_stock.py.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_vattn import _core
from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.geometry import READ_AHEAD_TOKENS
from sglang_vattn.pool import VattnPool
from sglang_vattn.running import _grow
from sglang_vattn.tree_cache import VattnTreeCache

PAGE_BYTES = 4096
SLOT = 1  # the one request slot in use
ROWS = 65


@dataclass
class Totals:
    """What an arm did, summed over its requests. Times are CPU seconds of the calling thread."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    tokens_copied: int = 0
    pages_aliased: int = 0
    tokens_dropped: int = 0  # computed, but not cached: the rest of a page
    evict_calls: int = 0
    tokens_evicted: int = 0
    match_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_s: float = 0.0


class Arm(Protocol):
    """A cache that requests go through."""

    name: str
    page_size: int
    totals: Totals

    def run(self, tokens: array[int], prompt_len: int) -> int:
        """One request from its match to its release; the tokens that it hit."""
        ...

    def wasted_tokens(self) -> int:
        """Slots of the pages in use, no request running, that hold no token of the tree."""
        ...

    def cached_tokens(self) -> int: ...

    def row(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class _DryPool(VattnPool):
    """A pool whose pages are mapped but never written: copies are counted."""

    def __init__(self, num_pages: int, page_size: int, longest: int) -> None:
        self.device, self.page_size, self.num_pages, self.layer_num = "cpu", page_size, num_pages, 1
        self.read_ahead = READ_AHEAD_TOKENS["cuda"]  # mapped ahead as on the GPU, so that map calls are those
        self.geometry = SimpleNamespace(page_bytes=PAGE_BYTES)  # type: ignore[assignment]
        self.space = _core.AddressSpace(
            _core.HostDriver(),
            num_pages,
            PAGE_BYTES,
            ROWS,
            -(-(longest + self.read_ahead) // page_size) + 1,
            dummy_row_pages=-(-(1 + self.read_ahead) // page_size),
        )

    def copy_partial(self, source: int, target: int, tokens: int) -> None:
        """Counted by the allocator; there is nothing to copy."""

    def zero(self, page: int, first_token: int = 0) -> None:
        """Nobody reads."""

    def drop_queued(self) -> list[int]:
        """Nothing is queued."""
        return []


class _CountingTree(VattnTreeCache):
    """Counts what is evicted."""

    totals: Totals

    def evict_pages(self, num_pages: int) -> int:
        freed = super().evict_pages(num_pages)
        self.totals.evict_calls += 1
        self.totals.tokens_evicted += freed * self.page_size
        return freed


class Vattn:
    """The plugin's caches over ``pool_tokens``."""

    name = "vattn"

    def __init__(self, pool_tokens: int, longest: int, page_size: int = 128) -> None:
        self.page_size = page_size
        self.totals = Totals()
        self.pool = _DryPool(pool_tokens // page_size, page_size, longest)
        self.allocator = VattnAllocator(
            self.pool.num_pages * page_size, dtype=torch.float32, device="cpu", pool=self.pool,
            request_slots=SLOT + 1, read_mode="auto", share_prefixes=False,
        )  # fmt: skip
        self.tree = _CountingTree(
            CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=page_size
            )
        )
        self.tree.totals = self.totals

    def run(self, tokens: array[int], prompt_len: int) -> int:
        tree, allocator, totals = self.tree, self.allocator, self.totals
        req: Any = SimpleNamespace(
            rid="r", lora_id=None, extra_key=None, cache_salt=None, priority=0, lock=None,
            origin_input_ids=tokens[:prompt_len], full_untruncated_fill_ids=tokens,
            kv=SimpleNamespace(req_pool_idx=SLOT, cache_inserted_len=0, cache_protected_len=0),
        )  # fmt: skip
        t0 = time.thread_time()
        key = RadixKey(req.origin_input_ids, None, limit=prompt_len - 1)
        match = tree.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len, req.last_node = match.device_prefix_len, match.last_device_node
        req.lock = tree.lock(req.last_node)
        t1 = time.thread_time()
        hit = req.prefix_len
        if hit:
            tree.prefix_device_indices(req)
        else:
            allocator.hits.clear()
        self._extend(req, hit, prompt_len)
        tree.checkpoint(req, up_to=prompt_len)
        t2 = time.thread_time()
        self._decode(req, prompt_len, len(tokens))
        t3 = time.thread_time()
        request = allocator.requests[SLOT]
        if request.row:  # a model would have been at it for seconds
            self.pool.space.wait(request.row, request.mapped, 10.0)
        t4 = time.thread_time()
        totals.tokens_copied += request.copied_tokens
        totals.pages_aliased += request.shared
        tree.checkpoint(req, up_to=len(tokens))
        tree.free_kv_row(req.kv, [(request.shared * self.page_size, len(tokens))])
        tree.unlock(req.lock)
        tree.on_release(req, checkpointed=True)
        allocator.rows.before_forward()
        t5 = time.thread_time()
        allocator.hits.clear()
        totals.match_s += t1 - t0
        totals.prefill_s += t2 - t1
        totals.decode_s += t3 - t2
        totals.finish_s += t5 - t4
        return int(hit)

    def _extend(self, req: Any, start: int, end: int) -> None:
        allocator = self.allocator
        starts, ends = torch.tensor([start]), torch.tensor([end])
        demand = allocator.get_extend_allocation_demand(starts, ends, conservative_num_tokens=0, shard_size=1)
        allocator.evict_to_free_tokens(self.tree, demand)
        with allocator.allocating_for([req]):
            slots = allocator.alloc_extend(starts, starts, ends, ends, torch.tensor([-1]), end - start)
        assert slots is not None and len(slots) == end - start
        _grow(allocator, req, end)
        allocator.rows.before_forward()

    def _decode(self, req: Any, start: int, end: int) -> None:
        """The steps at which a page is taken or mapped ahead; the others allocate nothing."""
        allocator, size = self.allocator, self.page_size
        ahead = self.pool.read_ahead
        crossing = range(start + (-start) % size + 1, end + 1, size)
        mapping = range(start + 1 + (-(start + ahead)) % size, end + 1, size)
        for length in sorted({*crossing, *mapping}):
            if (length - 1) % size == 0:
                lengths = torch.tensor([length])
                allocator.evict_to_free_tokens(self.tree, size)
                with allocator.allocating_for([req], pages_needed=1):
                    slots = allocator.alloc_decode(lengths, lengths, torch.tensor([0]))
                assert slots is not None
            _grow(allocator, req, length)
        allocator.rows.before_forward()

    def cached_tokens(self) -> int:
        return self.tree.total_size()

    def wasted_tokens(self) -> int:
        pages = self.allocator.pages
        return (pages.num_pages - pages.free) * self.page_size - self.cached_tokens()

    def row(self) -> dict[str, Any]:
        self.pool.space.drain(30.0)
        stats = self.pool.space.stats()
        names = ("map_calls", "pages_mapped", "set_access_calls", "unmap_calls", "pages_unmapped", "errors")
        problems = [*self.tree.tree.check_integrity(), *self.allocator.pages.check_integrity()]
        assert not problems, problems
        return {**asdict(self.totals), **{name: stats[name] for name in names}}

    def close(self) -> None:
        self.allocator.clear()
        self.pool.space.close()
