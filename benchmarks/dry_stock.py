# SPDX-License-Identifier: Apache-2.0
"""Stock's arm of the simulated replay: SGLang's default tree (UnifiedRadixCache, Rust core).

Its slots are counted and not handed out, so its time is the tree's alone.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benchmarks.dry import Totals


class _Slots:
    """Stock's allocator, as far as its tree calls it: counts."""

    device = torch.device("cpu")

    def __init__(self, page_size: int) -> None:
        self.page_size, self.freed = page_size, 0

    def free_segment(self, indices: torch.Tensor, start_pos: int) -> None:
        self.freed += len(indices)

    def free(self, indices: torch.Tensor) -> None:
        self.freed += len(indices)


class Stock:
    """SGLang's default tree, with its Rust core, over ``pool_tokens`` slots in pages of ``page_size``."""

    def __init__(self, pool_tokens: int, longest: int, page_size: int, core: str = "rust") -> None:
        self.name, self.page_size = f"stock_page{page_size}", page_size
        self.totals = Totals()
        self.pool_tokens = pool_tokens // page_size * page_size
        self.slots = torch.arange(longest + page_size)
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=_Slots(page_size), page_size=page_size
        )  # fmt: skip
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = core
        self.tree = UnifiedRadixCache(params)
        if (core == "rust") != type(self.tree.tree_core).__name__.lower().startswith("rust"):
            raise RuntimeError(f"SGLang built a {type(self.tree.tree_core).__name__} in place of its {core} core")

    def run(self, tokens: array[int], prompt_len: int) -> int:
        tree, totals, size, end = self.tree, self.totals, self.page_size, len(tokens)
        t0 = time.thread_time()
        key = RadixKey(tokens[:prompt_len], None, limit=prompt_len - 1)
        match = tree.match_prefix(MatchPrefixParams(key=key))
        hit = int(match.device_prefix_len)
        lock = tree.lock(match.last_device_node)
        t1 = time.thread_time()
        if hit:
            tree.path_device_indices(match.last_device_node)
        # SGLang makes room for the extension and, with pages, one page more (alloc_paged_token_slots_extend).
        held = self._take(0, prompt_len - hit, (prompt_len - hit) + (size if size > 1 else 0), hit)
        lock, protected = self._checkpoint(tokens, prompt_len, prompt_len, hit, 0, lock)
        held -= protected - hit
        t2 = time.thread_time()
        # Stock asks for a page at each step; nothing changes while there is one.
        available = self._available(held)
        for length in range(prompt_len + 1, end + 1):
            if available < size:
                self._evict(size - available)
                available = self._available(held)
            if (length - 1) % size == 0:
                held += size
                available -= size
        t3 = time.thread_time()
        lock, protected = self._checkpoint(tokens, end, prompt_len, protected, protected, lock)
        tree.unlock(lock)
        t4 = time.thread_time()
        totals.tokens_dropped += end - protected
        totals.match_s += t1 - t0
        totals.prefill_s += t2 - t1
        totals.decode_s += t3 - t2
        totals.finish_s += t4 - t3
        return hit

    def _available(self, held: int) -> int:
        return self.pool_tokens - int(self.tree.evictable_size()) - int(self.tree.protected_size()) - held

    def _evict(self, tokens: int) -> None:
        self.totals.evict_calls += 1
        self.totals.tokens_evicted += int(self.tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def _take(self, held: int, tokens: int, demand: int, start: int) -> int:
        """Slots held by the request behind its tree prefix, after it took pages for ``tokens`` more."""
        if (shortfall := demand - self._available(held)) > 0:
            self._evict(shortfall)
        needed = -(-(start + tokens) // self.page_size) * self.page_size - start
        assert self._available(held) >= needed, "the pool is too small for the request"
        return held + needed

    def _checkpoint(
        self, tokens: array[int], end: int, prompt_len: int, protected: int, inserted: int, lock: Any
    ) -> tuple[Any, int]:
        """As UnifiedRadixCache.checkpoint_into_tree: insert, cut at the prompt's end, move the lock."""
        size = self.page_size
        aligned = end // size * size
        if aligned == 0:
            return lock, protected
        values = self.slots[:aligned].clone()
        result = self.tree.insert(
            InsertParams(
                key=RadixKey(tokens[:aligned], None), value=values, prev_prefix_len=protected, inserted_len=inserted
            )
        )
        prompt = prompt_len // size * size
        if 0 < prompt < aligned:
            self.tree.insert(
                InsertParams(
                    key=RadixKey(tokens[:prompt], None),
                    value=values[:prompt],
                    prev_prefix_len=prompt,
                    inserted_len=prompt,
                    priority=1,
                )
            )
        self.tree.path_device_indices(result.last_device_node)
        new = self.tree.lock(result.last_device_node)
        self.tree.unlock(lock)
        return new, aligned

    def cached_tokens(self) -> int:
        return int(self.tree.evictable_size() + self.tree.protected_size())

    def wasted_tokens(self) -> int:
        return 0  # whole pages only; the rest is dropped

    def row(self) -> dict[str, Any]:
        return asdict(self.totals)

    def close(self) -> None:
        self.tree.reset()
