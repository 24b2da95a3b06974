# SPDX-License-Identifier: Apache-2.0
"""``--vattn-scrub``: no tenant's forward finds in its pages what another tenant left there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_vattn.pool import VattnPool

_NOBODY, _ANYBODY = object(), object()


class Scrub:
    """Knows whose tokens each page held last; queues the zeroing of a page that changes hands.

    The zeroing itself is one of :meth:`VattnPool.flush`'s operations: on the stream of the new tenant's forward, so
    behind a forward of the old tenant that is still in flight, and before the copy of a partial page.
    """

    def __init__(self, pool: VattnPool, *, enabled: bool) -> None:
        self._pool, self.enabled = pool, enabled
        self._last: list[Hashable] = [_NOBODY] * (pool.num_pages + 1)
        self.pages_scrubbed = 0

    def hand_over(self, pages: Sequence[int], tenant: Hashable) -> None:
        """A request of ``tenant`` is about to write into these pages, or has them mapped past its end."""
        if not self.enabled:
            return
        for page in pages:
            last, self._last[page] = self._last[page], tenant
            if last is not _NOBODY and last != tenant:
                self._pool.scrub(page)
                self.pages_scrubbed += 1

    def forget(self, pages: Sequence[int]) -> None:
        """These will not be zeroed after all: they may hold anybody's tokens."""
        for page in pages:
            self._last[page] = _ANYBODY
