# SPDX-License-Identifier: Apache-2.0
"""Locks, and what happens to pages: split, duplicate, evict, reset. One promise a test."""

from __future__ import annotations

import pytest
from sglang_vattn.radix import PrefixTree

from tests.radix.page_model import PageModel, take
from tests.radix.trees import cache, hit, tree_with

# ------------------------------------------------------------------ locks


def test_split_under_a_lock_locks_both_halves() -> None:
    """Reports 58 and 60: a split must not lose the lock, the counters must not move, eviction must not reach it."""
    tree = tree_with(4, range(10))
    node = tree.match(list(range(10))).node
    tree.lock(node)
    tree.lock(node)
    for cut in (6, 3, 9):
        counters = tree.store.protected, tree.store.evictable
        upper = tree.match(list(range(10)), limit=cut).node
        assert (upper.end, upper.lock) == (cut, 2)
        assert (tree.store.protected, tree.store.evictable) == counters == (3, 0)
        assert not tree.check_integrity()
    assert node.end == 10
    assert tree.evict(64) == 0
    assert hit(tree, range(10)) == 10
    tree.unlock(node)
    assert tree.evict(64) == 0
    tree.unlock(node)
    assert tree.store.evictable == 3
    assert tree.evict(64) == 3


def test_lock_covers_the_node_itself() -> None:
    """Report 60 (mini-sglang #52): a path without its last node."""
    tree = tree_with(4, range(4))
    node = tree.match(list(range(4))).node
    tree.lock(node)
    assert tree.store.protected == 1
    assert tree.evict(1) == 0


def test_unlock_never_goes_below_zero() -> None:
    tree = tree_with(4, range(8))
    node = tree.match(list(range(8))).node
    for target in (node, tree.root_node):
        with pytest.raises(ValueError, match="not locked"):
            tree.unlock(target)
    tree.lock(node)
    tree.unlock(node)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(node)
    assert not tree.check_integrity()


def test_handles_of_evicted_nodes_are_refused() -> None:
    tree = tree_with(4, range(8))
    node = tree.match(list(range(8))).node
    tree.evict(2)
    for call in (tree.lock, tree.path_pages):
        with pytest.raises(ValueError, match="evicted"):
            call(node)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(node)


def test_reset_is_refused_while_anything_is_locked() -> None:
    """Report 44: a flush while a request holds a node."""
    tree = tree_with(4, range(8), [5, 6])
    for held in (tree.match(list(range(3))).node, tree.root_node):
        tree.lock(held)
        with pytest.raises(ValueError, match="locks held"):
            tree.reset()
        assert hit(tree, range(8)) == 8
        tree.unlock(held)
    top, node = tree.root_node, tree.match([5, 6]).node
    tree.reset()
    assert tree.root_node is top
    assert tree.store.free == 64
    assert (tree.num_nodes, tree.num_tokens, len(tree.queue)) == (0, 0, 0)
    assert not tree.check_integrity()
    with pytest.raises(ValueError, match="evicted"):
        tree.lock(node)
    cache(tree, range(8))
    assert tree.evict(2) == 2


# ------------------------------------------------------------------ pages


def test_the_deepest_node_wins_a_page() -> None:
    """The example drawn in the package's docstring."""
    tree = PrefixTree(PageModel(64), 4)
    first = take(tree.store, 3)
    assert first == [1, 2, 3]
    tree.insert(list(range(6)), first)
    tree.insert(list(range(9)), first)
    assert tree.path_pages(tree.match(list(range(9))).node) == [1, 2, 3]
    own = take(tree.store, 1)
    assert own == [4]
    node = tree.insert([*range(6), 66], [1, 4]).node
    assert node.pages == [4]
    assert tree.path_pages(node) == [1, 4]
    assert tree.path_pages(node, 5) == [1, 4]
    assert tree.path_pages(node, 4) == [1]
    assert tree.path_pages(node, 0) == tree.path_pages(tree.root_node) == []
    for length in (-1, 8):
        with pytest.raises(ValueError, match="not on the path"):
            tree.path_pages(node, length)


def test_insert_refuses_too_few_pages_and_changes_nothing() -> None:
    tree = tree_with(4, range(8))
    before = tree.pretty()
    with pytest.raises(ValueError, match="3 pages"):
        tree.insert([0, 1, *range(50, 57)], [1, 2], "new")
    assert tree.pretty() == before
    assert tree.insert([], []) == (0, tree.root_node)


def test_equal_prompts_at_once_keep_their_own_pages() -> None:
    """Reports 28 and 59: the loser's duplicate pages are neither lost nor freed under it."""
    tree = tree_with(4)
    winner, loser = take(tree.store, 2), take(tree.store, 2)
    assert tree.insert(list(range(8)), winner).length == 0
    length, node = tree.insert(list(range(8)), loser)
    assert (length, tree.path_pages(node)) == (8, winner)
    assert tree.store.private == 4
    tree.store.release(loser)
    assert tree.store.free == 62
    tree.store.release(winner)
    assert (tree.store.free, tree.store.evictable) == (62, 2)


def test_eviction_of_pages_held_elsewhere_makes_progress() -> None:
    """Report 48: evicting a leaf whose pages a request owns frees nothing, and must not loop or stop there."""
    tree = tree_with(4)
    own = take(tree.store, 2)
    tree.insert(list(range(8)), own)
    cache(tree, [7, 8, 9, 10])
    assert tree.evict(1) == 1  # the older leaf went first and freed nothing
    assert tree.num_nodes == 0
    tree.insert(list(range(8)), own)
    assert tree.store.evictable == 0
    assert tree.evict(1) == 0
    assert tree.num_nodes == 1, "nothing could be freed, so nothing was dropped"
    tree.store.release(own)
    assert tree.evict(2) == 2


def test_eviction_of_half_a_page_waits_for_the_other_half() -> None:
    tree = tree_with(8, range(6))
    tree.match(list(range(6)), limit=3)
    assert tree.store.evictable == 1
    assert tree.evict(1) == 1
    assert tree.num_nodes == 0
