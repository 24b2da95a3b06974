# SPDX-License-Identifier: Apache-2.0
"""What a match finds, and in which order leaves go. One promise a test."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Hashable

import pytest
from sglang_vattn.radix import PrefixTree

from tests.radix.page_model import PageModel, take
from tests.radix.simulation import Engine
from tests.radix.trees import cache, hit, tree_with

# ------------------------------------------------------------------ exactness


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 8])
def test_every_pair_of_short_prompts(page_size: int) -> None:
    """Prompts of 1 to 2 * page + 1 tokens, the second parting from the first at every place (reports 50, 52)."""
    lengths = range(1, 2 * page_size + 2)
    for first, second in itertools.product(lengths, lengths):
        for common in range(min(first, second) + 1):
            engine = Engine(12, page_size)
            for tokens in (array("q", [0] * first), array("q", [0] * common + [1] * (second - common))):
                request = engine.admit(tokens)
                assert request is not None
                engine.checkpoint(request)
                engine.leave(request, checkpoint=True)
                engine.check()
            assert engine.match(array("q", [0] * first), None)[0] == first
            engine.evict(12)
            assert engine.store.free == 12


def test_the_last_partial_page_is_kept() -> None:
    tree = tree_with(4, range(6))
    assert hit(tree, range(6)) == 6
    assert hit(tree, [0, 1, 2, 3, 4, 9]) == 5
    assert hit(tree, range(100)) == 6  # the match before cut at 5, which must not lose the tail


def test_limit_caps_the_match_and_cuts_there() -> None:
    tree = tree_with(4, range(8))
    for limit in range(9):
        length, node = tree.match(list(range(8)), limit=limit)
        assert (length, node.end) == (limit, limit)
        assert node is tree.root_node or limit
        assert not tree.check_integrity()
    assert tree.match(list(range(3)), limit=7).length == 3
    with pytest.raises(ValueError, match="limit"):
        tree.match([1], limit=-1)


def test_tokens_may_be_any_int64_buffer() -> None:
    tree = tree_with(4, range(5))
    numbers = [0, 1, 2, 3, 4, -7, 2**40]
    for tokens in (numbers, tuple(numbers), array("q", numbers), memoryview(array("q", numbers)), iter(numbers)):
        assert tree.match(tokens).length == 5
    longs = (ctypes.c_int64 * 7)(*numbers)
    assert tree.match(memoryview(longs).cast("B").cast("q")).length == 5
    for wrong in (array("i", numbers[:5]), array("d", [0.0]), b"\0\1", memoryview(array("i", [0, 1]))):
        with pytest.raises(TypeError, match="int64"):
            tree.match(wrong)


def test_insert_leaves_the_callers_tokens_alone() -> None:
    tree = tree_with(4)
    tokens = array("q", range(6))
    pages = take(tree.store, 2)
    tree.insert(tokens, pages)
    tokens.append(6)  # a resize would raise BufferError if the tree still exported it
    tokens[0] = 9
    assert hit(tree, range(6)) == 6


# ------------------------------------------------------------------ namespaces


def test_crafted_namespaces_never_meet() -> None:
    """Report 50: equal as a concatenation, different as values."""
    crafted: list[Hashable] = [
        None,
        "",
        "None",
        ("a", "bc"),
        ("ab", "c"),
        ("abc", None),
        ("a", "b", "c"),
        "abc",
        b"abc",
    ]
    tree = tree_with(4)
    for n, namespace in enumerate(crafted):
        assert hit(tree, range(8), namespace) == 0
        cache(tree, range(8), namespace)
        assert tree.num_nodes == n + 1
    pages = [tree.path_pages(tree.match(list(range(8)), namespace).node) for namespace in crafted]
    assert len({page for path in pages for page in path}) == 2 * len(crafted)


def test_hostile_salts_leave_no_trace() -> None:
    tree = tree_with(4)
    for salt in range(500):
        assert tree.match(list(range(8)), salt) == (0, tree.root_node)
        assert tree.root(salt) is tree.root_node
        tree.touch(list(range(8)), salt)
    assert not tree.root_node.children
    for salt in range(500):
        cache(tree, range(8), salt)
        tree.evict(2)
    assert not tree.root_node.children
    assert len(tree.queue) <= 1


def test_a_locked_namespace_stays() -> None:
    tree = tree_with(4)
    cache(tree, range(8), "a")
    root = tree.root("a")
    tree.lock(root)
    tree.evict(64)
    assert tree.num_nodes == 0
    assert tree.root("a") is root
    tree.unlock(root)
    assert tree.root("a") is tree.root_node
    # A handle to a dropped root can still be locked: it pins nothing, and takes nothing away from its successor.
    cache(tree, range(8), "a")
    tree.lock(root)
    tree.unlock(root)
    assert tree.root("a") is not root
    assert hit(tree, range(8), "a") == 8
    assert not tree.check_integrity()


# ------------------------------------------------------------------ order


def test_touch_bumps_without_a_split() -> None:
    tree = tree_with(4, range(8), [9, 9, 9])
    tree.touch([0, 1, 2])
    assert tree.num_nodes == 2
    tree.evict(1)
    assert (hit(tree, range(8)), hit(tree, [9])) == (8, 0)


def test_a_reinserted_request_counts_once() -> None:
    """Stock's ``cache_inserted_len``: chunks of one prefill are no hits."""
    tree = tree_with(4, policy="lfu")
    pages = take(tree.store, 3)
    for end, before in ((4, 0), (8, 4), (12, 8), (12, 12)):
        node = tree.insert(list(range(end)), pages, inserted_len=before).node
    assert [node.hits, node.parent and node.parent.hits] == [1, 1]
    assert tree.insert(list(range(12)), pages).node.hits == 2


def test_priority_spreads_to_the_path_and_survives_a_split() -> None:
    tree = tree_with(1, policy="priority")
    cache(tree, [1, 2, 3, 4], priority=-3)
    cache(tree, [1, 2, 5], priority=4)
    upper = tree.match([1, 2]).node
    assert {node.tokens[0]: node.priority for node in upper.children.values()} == {3: -3, 5: 4}
    assert upper.priority == 4
    tree.evict(2)
    assert hit(tree, [1, 2, 3]) == 2
    assert hit(tree, [1, 2, 5]) == 3


@pytest.mark.parametrize(
    ("policy", "reason"), [("tlru", "rank falls"), ("mru", "falls"), ("fifo", "not implemented"), ("best", "unknown")]
)
def test_other_policies_are_refused_with_a_reason(policy: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{policy}.*{reason}.*lru, lfu, slru, priority"):
        PrefixTree(PageModel(1), 4, policy)


def test_page_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="page_size"):
        PrefixTree(PageModel(1), 0)


def test_pretty_shows_every_node() -> None:
    tree = tree_with(4, range(8), [0, 1, 9], [5])
    text = tree.pretty()
    assert text.count("<Node") == tree.num_nodes + 1
    assert text.startswith("4 nodes, 10 tokens, page_size 4, lru")
