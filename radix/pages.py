# SPDX-License-Identifier: Apache-2.0
"""What the prefix tree asks of the page bookkeeping (``sglang_vattn._core.Pages`` implements it).

A page is the only unit that is counted, shared and freed. Its state is a function of three numbers:

    owned by a running request ----------------------------> PRIVATE
    else: no tree reference -------------------------------> FREE
    else: at least one reference from a locked node -------> PROTECTED
    else --------------------------------------------------> EVICTABLE

PRIVATE + FREE + EVICTABLE + PROTECTED is the size of the pool, always. The tree owns the second and third number
(``ref``/``unref``, ``lock``/``unlock``); it never sets an owner, takes a page or releases one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PageStore(Protocol):
    """Page counters. Every method is O(len(pages)), every property O(1); none maps or unmaps anything.

    Implementations raise, and change nothing, if a count would go negative or a page does not exist. A store may offer
    ``refs(page) -> (owned, tree references, locked tree references)``: then ``check_integrity`` compares every page of
    the tree, and the counters exactly.
    """

    def take(self, n: int) -> list[int] | None:
        """Make ``n`` FREE pages PRIVATE and return them; None, with nothing changed, if there are fewer."""
        ...

    def release(self, pages: Sequence[int]) -> None:
        """The owner gives ``pages`` up: each becomes FREE, or EVICTABLE/PROTECTED where the tree refers to it."""
        ...

    def ref(self, pages: Sequence[int], locked: bool) -> None:
        """One more tree reference for each page, from a node that is locked or not."""
        ...

    def unref(self, pages: Sequence[int], locked: bool) -> None:
        """The inverse of ``ref``. A page without owner and references becomes FREE."""
        ...

    def lock(self, pages: Sequence[int]) -> None:
        """A node that refers to ``pages`` became locked: its reference counts as locked from now on."""
        ...

    def unlock(self, pages: Sequence[int]) -> None:
        """The inverse of ``lock``."""
        ...

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        ...

    @property
    def evictable(self) -> int:
        """Pages that only unlocked nodes hold: exactly what eviction could free."""
        ...

    @property
    def private(self) -> int:
        """Pages of running requests."""
        ...

    @property
    def protected(self) -> int:
        """Pages that the tree holds for a lock's sake, with no owner."""
        ...
