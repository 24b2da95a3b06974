# SPDX-License-Identifier: Apache-2.0
"""SGLang's paged allocator over pages with reference counts that live on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

from sglang_vattn import _core
from sglang_vattn.pool import VattnPool
from sglang_vattn.reading import Reading
from sglang_vattn.request_pages import RequestPages, namespace_of
from sglang_vattn.reservations import Reservations
from sglang_vattn.rows import RowTable
from sglang_vattn.scrub import Scrub

if TYPE_CHECKING:
    from sglang_vattn.tree_cache import VattnTreeCache

UNREPORTED_HITS = 4096


class VattnAllocator(PagedTokenToKVPoolAllocator):
    """Pages for requests, by request: every allocation names whose it is.

    All sizes told to the scheduler are tokens in whole pages, plain integers (its watchdog thread reads them).
    ``requests`` maps a request's ``req_pool_idx`` to its pages; ``admitted`` holds, by rid, those that
    ``prefix_device_indices`` began before SGLang binds the request to a slot.

    Nothing is freed by slot number: a request's pages are given back through :meth:`release`, the tree's
    through its references. The methods that free by index raise, which proves that nobody calls them.
    """

    def __init__(
        self,
        size: int,
        *,
        dtype: torch.dtype,
        device: str,
        pool: VattnPool,
        request_slots: int,
        read_mode: str,
        share_prefixes: bool,
        scrub: bool = True,
    ) -> None:
        self.pages = _core.Pages(pool.num_pages)
        self.requests: dict[int, RequestPages] = {}
        self.admitted: dict[str, RequestPages] = {}
        self.scrub = Scrub(pool, enabled=scrub)
        self.ahead = Reservations(self.pages, pool, self.scrub, self._evict_one)
        self.rows = RowTable(pool, request_slots)
        self.reading = Reading(
            read_mode,
            self.rows,
            page_size=pool.page_size,
            page_bytes_per_layer=pool.geometry.page_bytes // pool.layer_num,
            share=share_prefixes,
        )
        self.hit_tokens = self.pages_aliased = self.tokens_copied = 0
        self.hits: dict[str, tuple[int, int]] = {}  # rid -> (pages aliased, tokens copied), until it is reported
        self.tree_cache: VattnTreeCache | None = None  # set by the tree, which is built later
        self._batch: Sequence[Any] | None = None
        self._pages_needed: int | None = None
        super().__init__(size, page_size=pool.page_size, dtype=dtype, device=device, kvcache=pool, need_sort=False)

    # ------------------------------------------------------------------ what the scheduler asks

    def available_size(self) -> int:
        return self.pages.free * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.tensor(self.pages.free_list(), dtype=torch.int64, device=self.device)

    # SGLANG_CHECK_KV_PAGE_INVARIANTS reads this; the base constructor assigns None to it
    free_pages = property(get_all_free_pages, lambda self, value: None)

    def merge_and_sort_free(self) -> None:
        """Nothing is staged: the free list is complete at any time."""

    def get_extend_allocation_demand(
        self,
        prefix_lens_cpu: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        *,
        conservative_num_tokens: int,
        shard_size: int,
    ) -> int:
        new_pages = self._pages_of(seq_lens_cpu.numpy()) - self._pages_of(prefix_lens_cpu.numpy())
        return int(new_pages.sum()) * self.page_size

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        # SGLang asks for a page a request before each decode step; nearly all of them stay in their last page.
        if self._pages_needed is not None:
            num_tokens = min(num_tokens, self._pages_needed * self.page_size)
        # Free pages that are reserved as the next of a running request are taken only when nothing else is left:
        # rather than that, evict. (What the scheduler is told counts them as free.)
        if tree_cache is not None and tree_cache.supports_prefix_sharing():
            shortfall = -(-num_tokens // self.page_size) - (self.pages.free - self.pages.reserved)
            if shortfall > 0:
                tree_cache.evict_pages(shortfall)
        return None

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's idle check calls this and stops the server for what it returns."""
        self.rows.idle()
        problems = [f"request slot {slot} still holds pages at idle" for slot in self.requests]
        problems += [f"request {rid} was admitted and never ran" for rid in self.admitted]
        return problems

    # ------------------------------------------------------------------ taking pages

    @contextmanager
    def allocating_for(self, reqs: Sequence[Any], *, pages_needed: int | None = None) -> Iterator[None]:
        """Names the requests, in batch order, that the allocations within are for."""
        self._batch, self._pages_needed = reqs, pages_needed
        try:
            yield
        finally:
            self._batch = self._pages_needed = None

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for tokens [prefix, seq) of each request of the batch, int64 (tokens,); None if pages run short."""
        batch = self._require_batch(len(prefix_lens_cpu))
        starts, ends = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        requests = [self._bind(req) for req in batch]
        counts = [
            -(-end // self.page_size) - -(-start // self.page_size) for start, end in zip(starts, ends, strict=True)
        ]
        for request, start in zip(requests, starts, strict=True):
            self._expect_pages(request, start)
        if self._extend_lists(requests, counts) is None:
            return None
        for request, end in zip(requests, ends, strict=True):
            self._kvcache.zero(request.pages[-1], (end - 1) % self.page_size + 1)  # the others are filled
        slots = [self.slots(request.pages, *span) for request, *span in zip(requests, starts, ends, strict=True)]
        return self._to_device(np.concatenate(slots))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """A slot for token ``seq - 1`` of each request, int64 (requests,); None if pages run short."""
        batch = self._require_batch(len(seq_lens_cpu))
        following = last_loc.to(torch.int64) + 1
        crossing = self.page_crossings(seq_lens_cpu)
        if not crossing:  # all stay in their last page
            return following
        requests = [self.requests[batch[index].kv.req_pool_idx] for index in crossing]
        for request, index in zip(requests, crossing, strict=True):
            self._expect_pages(request, int(seq_lens_cpu[index]) - 1)
        unprepared = self._extend_lists(requests, [1] * len(crossing))
        if unprepared is None:
            return None
        for page in unprepared:
            self._kvcache.zero(page)
        first_slots = np.full(len(batch), -1, dtype=np.int64)
        first_slots[crossing] = [request.pages[-1] * self.page_size for request in requests]
        fresh = self._to_device(first_slots)
        return torch.where(fresh >= 0, fresh, following)

    def _extend_lists(self, requests: Sequence[RequestPages], counts: Sequence[int]) -> list[int] | None:
        """Append so many pages to each request's list, those reserved for it first.

        Returns the pages that were not reserved, and so are not zeroed; None, and no change, if pages run short.
        """
        if sum(counts) > self.pages.free:
            return None
        missing = []
        for request, count in zip(requests, counts, strict=True):
            missing.append(self.ahead.take(request, count))
        taken = self.pages.take(sum(missing)) or []
        pages = iter(taken)
        for request, count, fresh in zip(requests, counts, missing, strict=True):
            request.pages += islice(pages, fresh)
            self.scrub.hand_over(request.pages[len(request.pages) - count :], request.tenant)
        return taken

    def page_crossings(self, seq_lens_cpu: torch.Tensor) -> list[int]:
        """Indices of the requests whose token ``seq - 1`` is the first of a page."""
        crossings: list[int] = np.flatnonzero((seq_lens_cpu.numpy() - 1) % self.page_size == 0).tolist()
        return crossings

    def admit(self, rid: str, request: RequestPages, hit_tokens: int) -> None:
        """Keep what a hit gave a request until SGLang binds it to a slot in the same allocation."""
        self.admitted[rid] = request
        self.hit_tokens += hit_tokens
        self.pages_aliased += request.shared
        self.tokens_copied += request.copied_tokens
        self.hits.setdefault(rid, (request.shared, request.copied_tokens))
        if len(self.hits) > UNREPORTED_HITS:  # answers that carry no meta_info (embeddings) leave theirs behind
            del self.hits[next(iter(self.hits))]

    def slots(self, pages: Sequence[int], start: int, end: int) -> np.ndarray:
        """Home slots of tokens [start, end) of a request with these pages, int64 (end - start,)."""
        size = self.page_size
        first = start // size
        span = np.asarray(pages[first : -(-end // size)], dtype=np.int64)
        return (span[:, None] * size + np.arange(size)).reshape(-1)[start - first * size : end - first * size]

    # ------------------------------------------------------------------ giving pages back

    def release(self, slot: int, start: int, end: int) -> None:
        """The request in ``slot`` gives back its own pages that hold tokens [start, end)."""
        given_back = self.requests[slot].release(start // self.page_size, -(-end // self.page_size))
        self.pages.release(given_back)

    def forget(self, slot: int) -> RequestPages:
        """The request in ``slot`` is gone, its pages given back: drop its record and its row."""
        request = self.requests.pop(slot)
        self._let_go(request)
        assert not any(request.pages[request.shared :]), f"slot {slot} left pages behind: {request}"
        return request

    def clear(self) -> None:
        """Flush: every page is free again. SGLang calls it only when no request runs (and once from the base)."""
        for request in self.requests.values():
            self._let_go(request)
        self.requests.clear()
        self.admitted.clear()
        self.scrub.forget(self._kvcache.drop_queued())
        self.pages.reset()
        self.rows.retire()
        self.free_group = None
        self.free_page_ids_group: list[torch.Tensor] = []
        self.staged_pages: list[torch.Tensor] = []
        self.num_staged_pages = 0

    def alloc(self, need_size: int) -> torch.Tensor:
        raise NotImplementedError("vattn: pages are taken for a request, not by count")

    def free(self, free_index: torch.Tensor) -> None:
        raise NotImplementedError("vattn: pages are given back through the tree cache, not by slot")

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.free(free_index)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        self.free(page_ids)

    # ------------------------------------------------------------------

    def _evict_one(self) -> int:
        return self.tree_cache.evict_pages(1) if self.tree_cache is not None else 0

    def _let_go(self, request: RequestPages) -> None:
        self.ahead.drop(request)
        self.reading.forget(request)
        self.rows.release(request)

    def _bind(self, req: Any) -> RequestPages:
        """The record of ``req``, now bound to its slot; a new one for a request without a hit."""
        slot = req.kv.req_pool_idx
        admitted = self.admitted.pop(req.rid, None)
        if admitted is None:
            return self.requests.setdefault(slot, RequestPages(slot=slot, tenant=namespace_of(req)))
        admitted.slot = slot
        admitted.row_deferred = self.reading.defers_row(admitted)
        assert slot not in self.requests, f"slot {slot} was given to {req.rid} before its last request left"
        self.requests[slot] = admitted
        return admitted

    def _require_batch(self, size: int) -> Sequence[Any]:
        batch = self._batch
        assert batch is not None and len(batch) == size, "vattn: allocation outside alloc_for_extend/alloc_for_decode"
        return batch

    def _expect_pages(self, request: RequestPages, tokens: int) -> None:
        assert len(request.pages) == -(-tokens // self.page_size), f"{len(request.pages)} pages for {tokens} tokens"

    def _pages_of(self, tokens: np.ndarray) -> np.ndarray:
        return -(-tokens // self.page_size)

    def _to_device(self, slots: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(slots)
        if self.device == "cpu":
            return host
        # pinned: an unpinned copy would make the scheduler wait for the stream
        return host.pin_memory().to(self.device, non_blocking=True)
