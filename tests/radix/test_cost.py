# SPDX-License-Identifier: Apache-2.0
"""Costs, counted and not timed (report 9: quadratic copying of the match list on long hits)."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from sglang_vattn.radix import Node, PrefixTree
from sglang_vattn.radix import tree as tree_module

from sglang_vattn._core import Pages, common_prefix
from tests.radix.page_model import PageModel, take

PAGE = 128


class Counts:
    """Operations since the last `clear`."""

    compared = calls = copied = 0

    def clear(self) -> None:
        self.compared = self.calls = self.copied = 0


class CountingTokens(array):  # type: ignore[type-arg]
    """array('q') that counts the tokens copied out of it."""

    counts: Counts

    def __getitem__(self, index: Any) -> Any:
        out = super().__getitem__(index)
        if isinstance(index, slice):
            self.counts.copied += len(out)
        return out


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = CountingTokens.counts = Counts()

    def counting(a: array[int], b: array[int], a_start: int = 0, b_start: int = 0) -> int:
        n = common_prefix(a, b, a_start, b_start)
        counts.calls += 1
        counts.compared += n
        return n

    monkeypatch.setattr(tree_module, "common_prefix", counting)
    return counts


def chunked(tree: PrefixTree, length: int, chunk: int) -> tuple[array[int], list[int]]:
    """A sequence of ``length`` tokens, inserted in chunks as a chunked prefill does."""
    tokens = CountingTokens("q", range(length))
    pages = take(tree.store, length // PAGE)
    for end in range(chunk, length + 1, chunk):
        tree.insert(array("q", tokens[:end]), pages)
    return tokens, pages


@pytest.mark.parametrize("length", [1 << 13, 1 << 15, 1 << 17])
def test_a_long_hit_is_linear(counts: Counts, length: int) -> None:
    """One compare call a node, each token compared once, none copied; each page of the path taken once."""
    tree = PrefixTree(PageModel(length // PAGE), PAGE)
    tokens, pages = chunked(tree, length, length // 64)
    counts.clear()
    assert tree.match(tokens).length == length
    assert (counts.calls, counts.compared, counts.copied) == (64, length, 0)

    node = tree.match(tokens).node
    taken = 0

    class CountingPages(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal taken
            out = super().__getitem__(index)
            taken += len(out) if isinstance(index, slice) else 1
            return out

    for held in tree.walk():
        held.pages = CountingPages(held.pages)
    assert tree.path_pages(node) == pages
    assert taken == len(pages)


@pytest.mark.parametrize("length", [1 << 13, 1 << 17])
def test_insert_copies_the_suffix_only(counts: Counts, length: int) -> None:
    store = PageModel(length // PAGE + 8)
    tree = PrefixTree(store, PAGE)
    tokens, pages = chunked(tree, length, length)
    longer = CountingTokens("q", [*tokens, *range(200)])
    more = take(store, 2)
    counts.clear()
    store.calls.clear()
    assert tree.insert(longer, [*pages, *more]).length == length
    assert (counts.compared, counts.copied) == (length, 200)
    assert store.calls == {"ref": 2}


def test_a_split_refers_to_one_page_more_at_most(counts: Counts) -> None:
    store = PageModel(64)
    tree = PrefixTree(store, PAGE)
    tokens, _ = chunked(tree, 64 * PAGE, 64 * PAGE)
    tree.lock(tree.match(tokens).node)
    store.calls.clear()
    assert tree.match(tokens, limit=1000).length == 1000
    assert store.calls == {"ref": 2}, "one reference, one of the locked ones"
    store.calls.clear()
    assert tree.match(tokens, limit=10 * PAGE).length == 10 * PAGE
    assert not store.calls


def leaves(tree: PrefixTree, n: int) -> list[array[int]]:
    """``n`` sequences of one page each."""
    out = [array("q", [i, *range(PAGE - 1)]) for i in range(n)]
    for tokens in out:
        pages = take(tree.store, 1)
        tree.insert(tokens, pages)
        tree.store.release(pages)
    return out


def counted_rank(tree: PrefixTree) -> Counts:
    """Count how often the queue looks at a node."""
    counts, rank = Counts(), tree.queue.rank

    def counting(node: Node) -> int:
        counts.calls += 1
        return rank(node)

    tree.queue.rank = counting
    return counts


def test_decode_evicts_page_by_page_without_a_scan() -> None:
    """Stock rebuilds a heap of all leaves for each call."""
    tree = PrefixTree(Pages(4000), PAGE)
    leaves(tree, 4000)
    counts = counted_rank(tree)
    assert [tree.evict(1) for _ in range(4000)] == [1] * 4000
    assert counts.calls <= 2 * 4000


def test_cutting_a_long_leaf_touches_only_what_goes(counts: Counts) -> None:
    """Decode evicts a page at a time from the end of one leaf, which must not be copied for that."""
    store = PageModel(1 << 10)
    tree = PrefixTree(store, PAGE)
    chunked(tree, PAGE << 10, PAGE << 10)
    store.owned.clear()
    (leaf,) = tree.walk()
    leaf.tokens = CountingTokens("q", leaf.tokens)
    counts.clear()
    store.calls.clear()
    assert [tree.evict(1) for _ in range(20)] == [1] * 20
    assert (counts.calls, counts.copied, store.calls) == (0, 0, {"unref": 20})


def test_accesses_cost_eviction_one_look_each() -> None:
    """However often a leaf is hit between two evictions, its entry is stale once."""
    tree = PrefixTree(Pages(1000), PAGE)
    sequences = leaves(tree, 1000)
    counts = counted_rank(tree)
    for _ in range(20):
        for tokens in sequences:
            tree.match(tokens)
    assert len(tree.queue) == 1000
    tree.evict(1)
    assert counts.calls <= 2 * 1000
    assert tree.match(sequences[0]).length == 0, "the least recently used one went"
    counts.clear()
    for _ in range(900):
        tree.evict(1)
    assert counts.calls <= 2 * 900


def test_locked_leaves_are_not_looked_at_again() -> None:
    tree = PrefixTree(Pages(1000), PAGE)
    sequences = leaves(tree, 1000)
    held = [tree.match(tokens).node for tokens in sequences[:500]]
    for node in held:
        tree.lock(node)
    assert tree.evict(1) == 1
    counts = counted_rank(tree)
    for _ in range(499):
        tree.evict(1)
    assert counts.calls <= 2 * 499
    assert tree.evict(1) == 0
    for node in reversed(held):
        tree.unlock(node)
    assert tree.evict(1000) == 500
    assert len(tree.queue) == 0
