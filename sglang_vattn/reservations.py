# SPDX-License-Identifier: Apache-2.0
"""Soft reservations: the free pages that running requests will probably take next, mapped ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_vattn import _core
from sglang_vattn.pool import VattnPool
from sglang_vattn.request_pages import RequestPages
from sglang_vattn.scrub import Scrub


class Reservations:
    """Keeps ``ahead`` of every request in step with what the core has reserved for it.

    A reserved page stays free in all counters and is the last that others are given.
    """

    def __init__(self, pages: _core.Pages, pool: VattnPool, scrub: Scrub, evict_one: Callable[[], int]) -> None:
        self._pages, self._pool, self._scrub, self._evict_one = pages, pool, scrub, evict_one
        self._lost = 0  # reservations, when we last looked

    def reserve(self, request: RequestPages, length: int) -> None:
        """Reserve the pages that kernels touch past ``length`` tokens and that the request will take next.

        Whether a row exists, or is mapped, does not matter here: what is evicted for a reservation must not depend on
        timing.
        """
        request.needed = -(-(length + self._pool.read_ahead) // self._pool.page_size)
        while request.backed < request.needed:
            page = self._pages.reserve(request.slot)
            if page == 0 and self._evict_one():
                page = self._pages.reserve(request.slot)
            if page == 0:  # nothing free, nothing to evict: this request reads by pages
                return
            request.ahead.append(page)
            self._pool.zero(page)
            self._scrub.hand_over([page], request.tenant)

    def take(self, request: RequestPages, count: int) -> int:
        """Append up to ``count`` reserved pages to the request's own; returns how many are still missing."""
        while count and request.ahead:
            if not self._pages.take_reserved(request.ahead[0], request.slot):
                self.drop(request)
                break
            request.pages.append(request.ahead.pop(0))
            count -= 1
        return count

    def keep(self, requests: Iterable[RequestPages]) -> None:
        """Drop reservations whose page another request has taken, which happens only when nothing else was left."""
        if self._pages.reservations_lost == self._lost:
            return
        self._lost = self._pages.reservations_lost
        for request in requests:
            if not all(self._pages.is_reserved(page, request.slot) for page in request.ahead):
                self.drop(request)

    def drop(self, request: RequestPages) -> None:
        """Give up the reservations; what the row holds past the request's own pages is no longer right."""
        for page in request.ahead:
            self._pages.unreserve(page, request.slot)
        request.ahead.clear()
        request.valid = min(request.valid, len(request.pages))
