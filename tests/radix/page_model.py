# SPDX-License-Identifier: Apache-2.0
"""A PageStore that is slow, obvious and complains: every state is derived from sets and counts on each question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Takes(Protocol):
    """A store of either kind."""

    def take(self, n: int) -> list[int] | None: ...


def take(store: Takes, n: int) -> list[int]:
    """``n`` pages, which must be there."""
    pages = store.take(n)
    assert pages is not None
    return pages


class PageModel:
    """``PageStore`` over ``num_pages`` pages, numbered from 1 like the pool's (page 0 is padding)."""

    def __init__(self, num_pages: int) -> None:
        self.pages = range(1, num_pages + 1)
        self.owned: set[int] = set()
        self.tree: Counter[int] = Counter()
        self.locked: Counter[int] = Counter()
        self.calls: Counter[str] = Counter()  # pages passed to each verb: what the linearity tests count

    def state(self, page: int) -> str:
        if page in self.owned:
            return "private"
        if not self.tree[page]:
            return "free"
        return "protected" if self.locked[page] else "evictable"

    def count(self, state: str) -> int:
        return sum(self.state(page) == state for page in self.pages)

    free = property(lambda self: self.count("free"))
    evictable = property(lambda self: self.count("evictable"))
    private = property(lambda self: self.count("private"))
    protected = property(lambda self: self.count("protected"))

    def take(self, n: int) -> list[int] | None:
        pages = [page for page in self.pages if self.state(page) == "free"][:n]
        if len(pages) < n:
            return None
        self.owned.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        assert self.owned.issuperset(pages), f"{pages} are not all owned"
        self.owned.difference_update(pages)

    def ref(self, pages: Sequence[int], locked: bool) -> None:
        assert all(self.state(page) != "free" for page in pages), f"reference to a free page in {pages}"
        self._add("ref", self.tree, pages, 1)
        if locked:
            self._add("ref", self.locked, pages, 1)

    def unref(self, pages: Sequence[int], locked: bool) -> None:
        if locked:
            self._add("unref", self.locked, pages, -1)
        self._add("unref", self.tree, pages, -1)

    def lock(self, pages: Sequence[int]) -> None:
        self._add("lock", self.locked, pages, 1)

    def unlock(self, pages: Sequence[int]) -> None:
        self._add("unlock", self.locked, pages, -1)

    def refs(self, page: int) -> tuple[bool, int, int]:
        return page in self.owned, self.tree[page], self.locked[page]

    def _add(self, verb: str, counts: Counter[int], pages: Sequence[int], by: int) -> None:
        self.calls[verb] += len(pages)
        for page in pages:
            assert page in self.pages, f"{verb} of page {page}, which does not exist"
            counts[page] += by
            assert counts[page] >= 0, f"{verb}: the count of page {page} went negative"
            assert self.locked[page] <= self.tree[page], f"{verb}: more locks than references of page {page}"
