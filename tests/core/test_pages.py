# SPDX-License-Identifier: Apache-2.0
"""Pages against a model that is trivially true: three dicts and two lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_vattn._core import Pages

NUM_PAGES = 8
page_lists = st.lists(st.integers(1, NUM_PAGES), max_size=5)
any_page_lists = st.lists(st.integers(-1, NUM_PAGES + 1), max_size=5)
rows = st.integers(0, 2)


class Model:
    def __init__(self) -> None:
        self.owned: set[int] = set()
        self.tree: Counter[int] = Counter()
        self.locked: Counter[int] = Counter()
        self.plain = list(range(1, NUM_PAGES + 1))  # the next to be taken first
        self.reserved: list[tuple[int, int]] = []  # (page, row), the oldest first

    def state(self, page: int) -> str:
        if page in self.owned:
            return "private"
        if not self.tree[page]:
            return "free"
        return "protected" if self.locked[page] else "evictable"

    def free_list(self) -> list[int]:
        return self.plain + [page for page, _ in self.reserved]

    def settle(self, pages: list[int]) -> None:
        for page in pages:
            free = self.state(page) == "free"
            if free and page not in self.free_list():
                self.plain.insert(0, page)
            elif not free:
                self.plain = [p for p in self.plain if p != page]
                self.reserved = [(p, row) for p, row in self.reserved if p != page]

    def change(self, pages: list[int], owned: int = 0, tree: int = 0, locked: int = 0) -> bool:
        """False, and no change, if any page is bad or any count would be impossible."""
        new_owned = Counter(dict.fromkeys(self.owned, 1))
        new_tree, new_locked = self.tree.copy(), self.locked.copy()
        for page in pages:
            if not 1 <= page <= NUM_PAGES:
                return False
            new_owned[page] += owned
            new_tree[page] += tree
            new_locked[page] += locked
            if new_owned[page] < 0 or not 0 <= new_locked[page] <= new_tree[page]:
                return False
        self.owned = {page for page in new_owned if new_owned[page]}
        self.tree, self.locked = new_tree, new_locked
        self.settle(pages)
        return True


class PagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(NUM_PAGES)
        self.model = Model()

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def take(self, n: int) -> None:
        free = self.model.free_list()
        want = free[:n] if n <= len(free) else None
        assert self.pages.take(n) == want
        for page in want or []:
            self.model.owned.add(page)
        self.model.settle(want or [])

    def batch(self, call: str, pages: list[int], *args: bool, **change: int) -> None:
        if self.model.change(pages, **change):
            getattr(self.pages, call)(pages, *args)
        else:
            with pytest.raises(ValueError, match="page"):
                getattr(self.pages, call)(pages, *args)

    @rule(pages=any_page_lists)
    def release(self, pages: list[int]) -> None:
        self.batch("release", pages, owned=-1)

    @rule()
    def release_all_owned(self) -> None:
        self.batch("release", sorted(self.model.owned), owned=-1)

    @rule(pages=any_page_lists, locked=st.booleans())
    def ref(self, pages: list[int], locked: bool) -> None:
        self.batch("ref", pages, locked, tree=1, locked=int(locked))

    @rule(pages=page_lists, locked=st.booleans())
    def unref(self, pages: list[int], locked: bool) -> None:
        self.batch("unref", pages, locked, tree=-1, locked=-int(locked))

    @rule(pages=page_lists)
    def lock(self, pages: list[int]) -> None:
        self.batch("lock", pages, locked=1)

    @rule(pages=page_lists)
    def unlock(self, pages: list[int]) -> None:
        self.batch("unlock", pages, locked=-1)

    @rule(row=rows)
    def reserve(self, row: int) -> None:
        want = self.model.plain.pop(0) if self.model.plain else 0
        if want:
            self.model.reserved.append((want, row))
        assert self.pages.reserve(row) == want

    @rule(page=st.integers(0, NUM_PAGES), row=rows)
    def take_reserved(self, page: int, row: int) -> None:
        want = (page, row) in self.model.reserved
        assert self.pages.take_reserved(page, row) == want
        if want:
            self.model.owned.add(page)
            self.model.settle([page])

    @rule(page=st.integers(0, NUM_PAGES), row=rows)
    def unreserve(self, page: int, row: int) -> None:
        self.pages.unreserve(page, row)
        if (page, row) in self.model.reserved:
            self.model.reserved.remove((page, row))
            self.model.plain.insert(0, page)

    @rule()
    def reset(self) -> None:
        self.pages.reset()
        self.model = Model()

    @invariant()
    def equal(self) -> None:
        model, pages = self.model, self.pages
        assert pages.check_integrity() == []
        assert pages.free_list() == model.free_list()
        states = Counter(model.state(page) for page in range(1, NUM_PAGES + 1))
        assert states == +Counter(
            free=pages.free, private=pages.private, evictable=pages.evictable, protected=pages.protected
        )
        for page in range(1, NUM_PAGES + 1):
            assert pages.state(page) == model.state(page)
            assert pages.refs(page) == (page in model.owned, model.tree[page], model.locked[page])
        names = ["free", "private", "evictable", "protected"]
        assert [names[state] for state in pages.states()[1:]] == [model.state(p) for p in range(1, NUM_PAGES + 1)]


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_reserved_page_is_everybodys_last_choice() -> None:
    pages = Pages(3)
    first, second = pages.reserve(7), pages.reserve(8)
    assert (first, second, pages.free) == (1, 2, 3)
    assert pages.take(2) == [3, first]  # plain, then the oldest reservation
    assert not pages.take_reserved(first, 7)
    assert not pages.take_reserved(second, 7)
    assert pages.take_reserved(second, 8)
    assert pages.free == 0
    assert pages.reserve(9) == 0


def test_the_padding_page_is_never_handed_out() -> None:
    pages = Pages(4)
    assert pages.take(5) is None
    assert pages.take(4) == [1, 2, 3, 4]
    for call in (pages.state, pages.refs):
        with pytest.raises(ValueError, match="page 0 is not in 1..4"):
            call(0)


def test_cost_of_a_page_does_not_grow_with_the_pool() -> None:
    """Take and release of everything in 200,000 pages: quadratic would take minutes."""
    pages = Pages(200_000)
    taken = pages.take(200_000)
    assert taken is not None
    pages.ref(taken, locked=True)
    pages.release(taken)
    assert pages.protected == 200_000
    pages.unref(taken, locked=True)
    assert (pages.free, pages.check_integrity()) == (200_000, [])
