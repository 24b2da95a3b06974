# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix-cache contract over the token-exact prefix tree."""

from __future__ import annotations

import time
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.pool import VattnPool
from sglang_vattn.radix import Node, PrefixTree
from sglang_vattn.request_pages import RequestPages, namespace_of

HIGHEST_PRIORITY = 2**63 - 1


class VattnTreeCache(BasePrefixCache):
    """Prefix reuse exact to the token: whole pages by alias, the rest of the last page by a copy.

    A match allocates nothing and locks nothing. The page for the partial copy is taken at admission
    (:meth:`prefix_device_indices`). ``cache_protected_len`` stays at the aliased prefix for the request's
    whole life: pages past it are the request's own until its release, also when the tree refers to them.
    """

    def __init__(self, params: CacheInitParams) -> None:
        allocator = params.token_to_kv_pool_allocator
        assert isinstance(allocator, VattnAllocator), type(allocator)
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = self.allocator = allocator
        self.pool: VattnPool = allocator.get_kvcache()
        self.page_size = params.page_size
        self.sliding_window_size = None
        if params.enable_metrics:
            self.init_metrics_collector()
        allocator.tree_cache = self
        self.evicted_pages = 0
        self.tree = PrefixTree(
            allocator.pages, self.page_size, params.eviction_policy.lower(), **(params.eviction_policy_config or {})
        )

    @property
    def root_node(self) -> Node:
        return self.tree.root_node

    def reset(self) -> None:
        self.tree.reset()

    # ------------------------------------------------------------------ match and admission

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, req = params.key, params.req
        namespace = namespace_of(req)
        if self.disable or len(key) == 0:
            root = self.root_node
            return MatchResult(0, root, root, root)
        length, node = self.tree.match(key.token_ids, namespace, limit=len(key))
        return MatchResult(length, node, node, node, cache_protected_len=self._whole_pages(length))

    def touch(self, req: Any) -> None:
        """Keep the waiting request's prefix recent, without a split."""
        if not self.disable:
            self.tree.touch(req.origin_input_ids + req.output_ids, namespace_of(req))

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Slots of the matched prefix, int64 (prefix_len,). Called once for an admitted request, its path locked.

        Here the hit becomes real: whole pages are shared; for the rest of the last page the request gets a page
        of its own, and the copy is queued for the stream of its forward.
        """
        size, length, allocator = self.page_size, req.prefix_len, self.allocator
        path = self.tree.path_pages(req.last_node, length)
        shared, rest = divmod(length, size)
        request = RequestPages(path[:shared], shared, copied_tokens=rest, tenant=namespace_of(req))
        if rest:
            own = self._take_page()
            allocator.scrub.hand_over([own], request.tenant)
            self.pool.copy_partial(path[shared], own, rest)
            request.pages.append(own)
        allocator.admit(req.rid, request, length)
        return allocator._to_device(allocator.slots(request.pages, 0, length))

    def _take_page(self) -> int:
        pages = self.allocator.pages.take(1)
        if pages is None:
            self.evict_pages(1)
            pages = self.allocator.pages.take(1)
        assert pages is not None, "the prefill budget admitted a request without room for its partial page"
        return pages[0]

    # ------------------------------------------------------------------ a running request's KV

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the request's tokens [0, up_to), the last partial page included, and lock that path instead."""
        if self.disable or up_to == 0:
            return
        request = self.allocator.requests[req.kv.req_pool_idx]
        tokens = req.full_untruncated_fill_ids[:up_to]
        namespace, priority = namespace_of(req), req.priority or 0
        cached, node = self.tree.insert(
            tokens, request.pages, namespace, priority, inserted_len=req.kv.cache_inserted_len
        )
        own = max(req.kv.cache_inserted_len, request.shared * self.page_size + request.copied_tokens)
        request.duplicate = request.duplicate or cached > own
        prompt = len(req.origin_input_ids)
        if 0 < prompt < up_to:
            # Stock cuts the path at the prompt's end and ranks the prompt higher, so that answers, which are
            # rarely hit, are evicted first.
            prompt_priority = min(priority + 1, HIGHEST_PRIORITY)
            self.tree.insert(tokens[:prompt], request.pages, namespace, prompt_priority, inserted_len=prompt)
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, up_to)
        # Others computed the same meanwhile, and the tree has it in their pages. This request reads its own: to lock
        # theirs would take pages out of what the scheduler was told it may evict, and its next chunk may need them.
        if not request.duplicate:
            previous, req.lock = req.lock, self.lock(node)
            self.unlock(previous)
            req.last_node = node

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        for start, end in ranges:
            if start < end:
                self.allocator.release(kv.req_pool_idx, start, end)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self.allocator.forget(req.kv.req_pool_idx)

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        self.tree.lock(node)
        return IncLockRefResult()

    def dec_lock_ref(self, node: Node, params: DecLockRefParams | None = None) -> DecLockRefResult:
        self.tree.unlock(node)
        return DecLockRefResult()

    # ------------------------------------------------------------------ eviction and sizes

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult(
            num_tokens_evicted=self.evict_pages(-(-params.num_tokens // self.page_size)) * self.page_size
        )

    def evict_pages(self, num_pages: int) -> int:
        """Evict until so many pages are free again, or nothing unlocked is left; returns the pages freed."""
        if self.disable:
            return 0
        start = time.perf_counter()
        freed = self.tree.evict(num_pages)
        self.evicted_pages += freed
        self.update_eviction_metrics(freed * self.page_size, start)
        return freed

    def evictable_size(self) -> int:
        return self.allocator.pages.evictable * self.page_size

    def protected_size(self) -> int:
        return self.allocator.pages.protected * self.page_size

    def total_size(self) -> int:
        return self.tree.num_tokens

    def supports_prefix_sharing(self) -> bool:
        return not self.disable

    def pretty_print(self) -> None:
        print(self.tree.pretty())

    def _whole_pages(self, tokens: int) -> int:
        return tokens // self.page_size * self.page_size
