# SPDX-License-Identifier: Apache-2.0
"""What an eviction takes of a leaf: no more than was asked for, and tails first. One promise a test."""

from __future__ import annotations

import random
from array import array

import pytest
from sglang_vattn.radix import POLICIES, Node, PrefixTree

from tests.radix.page_model import PageModel, take
from tests.radix.simulation import Engine
from tests.radix.test_fuzz import CRAFTED, random_step
from tests.radix.trees import cache, hit, tree_with


def finished(tree: PrefixTree, prompt: list[int], answer: list[int]) -> None:
    """A request as the plugin runs it: its prompt goes into the tree, then both, and its pages lose their owner."""
    tokens = prompt + answer
    cached = tree.match(prompt).length
    whole = cached // tree.page_size
    aliased = tree.path_pages(tree.match(prompt).node, cached)[:whole]
    own = take(tree.store, -(-len(tokens) // tree.page_size) - whole)
    tree.insert(prompt, aliased + own)
    tree.insert(tokens, aliased + own, inserted_len=len(prompt))
    tree.store.release(own)
    assert not tree.check_integrity()


# ------------------------------------------------------------------ no more than was asked for


def test_a_leaf_goes_from_its_end_page_by_page() -> None:
    tree = tree_with(4, range(16), [9] * 8)
    for left in (12, 8, 4):
        assert tree.evict(1) == 1
        assert not tree.check_integrity()
        assert (hit_unstamped(tree, range(16)), hit_unstamped(tree, [9] * 8)) == (left, 8)
    assert tree.evict(2) == 2
    assert (hit(tree, range(16)), hit(tree, [9] * 8)) == (0, 4)


def hit_unstamped(tree: PrefixTree, tokens: object) -> int:
    """How much of ``tokens`` is cached, without an access that would change what goes next."""
    wanted = array("q", tokens)  # type: ignore[arg-type]
    return max((_common(path, wanted) for path in strings(tree)), default=0)


def _common(a: array[int], b: array[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def strings(tree: PrefixTree) -> list[array[int]]:
    """The token string of each node's path."""
    out = []
    for node in tree.walk():
        path, above = array("q"), node
        while above.end:
            path = above.tokens + path
            assert above.parent is not None
            above = above.parent
        out.append(path)
    return out


def test_a_leaf_that_was_cut_grows_again() -> None:
    tree = tree_with(4, range(16))
    tree.evict(2)
    assert hit(tree, range(16)) == 8
    cache(tree, range(20))
    assert hit(tree, range(20)) == 20
    assert tree.evict(5) == 5
    assert tree.store.free == 64


def test_a_handle_to_a_leaf_that_was_cut_is_refused_beyond_its_end() -> None:
    tree = tree_with(4, range(16))
    length, node = tree.match(list(range(16)))
    tree.evict(1)
    with pytest.raises(ValueError, match="not on the path: the node ends at 12"):
        tree.path_pages(node, length)
    assert len(tree.path_pages(node)) == 3


# ------------------------------------------------------------------ tails first


def test_an_answers_last_partial_page_goes_before_older_leaves() -> None:
    tree = tree_with(4, [5] * 8)
    finished(tree, list(range(8)), [50, 51, 52, 53, 54, 55])
    assert tree.evict(1) == 1
    assert hit_unstamped(tree, [*range(8), 50, 51, 52, 53, 54, 55]) == 12, "only the partial page is gone"
    assert hit_unstamped(tree, [5] * 8) == 8
    assert tree.evict(2) == 2
    assert hit_unstamped(tree, [5] * 8) == 0, "then the least recently used leaf has its turn"
    assert hit_unstamped(tree, [*range(8), 50, 51, 52, 53]) == 12


def test_a_tail_that_a_conversation_went_on_from_waits_its_turn() -> None:
    tree = tree_with(4)
    finished(tree, list(range(8)), [50, 51])
    finished(tree, [*range(8), 50, 51, 60, 61, 62], [70, 71, 72])  # ends with a whole page
    cache(tree, [7] * 4)
    tree.evict(1)
    assert hit_unstamped(tree, [*range(8), 50, 51, 60, 61, 62]) == 12, "the end of its last leaf, in LRU order"
    tree.evict(1)
    assert hit_unstamped(tree, [*range(8), 50, 51, 60, 61, 62]) == 10, "the first answer is whole"


@pytest.mark.parametrize(("prompt", "kept"), [(9, 8), (10, 12)])
def test_a_prompts_own_last_page_is_kept_from_half_a_page_on(prompt: int, kept: int) -> None:
    """Prompt and answer end in one page: it goes first if less than half of it is the prompt's."""
    tree = tree_with(4, [5] * 8)
    finished(tree, list(range(prompt)), list(range(50, 62 - prompt - 1)))
    tree.evict(1)
    whole = [*range(prompt), *range(50, 62 - prompt - 1)]
    assert hit_unstamped(tree, whole) == min(kept, len(whole))
    assert hit_unstamped(tree, [5] * 8) == (8 if kept == 8 else 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rank_comes_before_the_tail(policy: str) -> None:
    tree = tree_with(4, policy=policy)
    cache(tree, range(6), priority=5)
    for _ in range(3):
        cache(tree, range(6), priority=5)
    cache(tree, [9] * 4, priority=0)
    tree.evict(1)
    first_is_tail = policy == "lru"
    assert hit_unstamped(tree, range(6)) == (4 if first_is_tail else 6)


def test_nothing_is_a_tail_at_page_size_1() -> None:
    tree = tree_with(1, range(5), [7, 8], [7, 9])
    assert not any(tree.queue.has_tail(node) for node in tree.walk())


# ------------------------------------------------------------------ against a scan


def victim(tree: PrefixTree) -> Node:
    """The leaf that goes next, from the rule as documented, by looking at every leaf."""
    size = tree.page_size

    def tail(leaf: Node) -> bool:
        of_parent = max(0, leaf.start - leaf.end // size * size)
        return leaf.end % size != 0 and not leaf.continued and of_parent < size / 2

    leaves = [node for node in tree.walk() if not node.children and not node.lock]
    return min(leaves, key=lambda node: (tree.queue.rank(node), not tail(node), node.used, node.serial))


@pytest.mark.parametrize("page_size", [2, 3, 4, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_that_goes_is_the_one_that_a_scan_finds(policy: str, page_size: int) -> None:
    rng = random.Random(f"{policy} {page_size}")
    engine = Engine(24, page_size, policy)
    namespaces = rng.sample(CRAFTED, 2)
    freed_at_once = 0
    for _ in range(400):
        random_step(engine, rng, namespaces, longest=4 * page_size + 1)
        if not engine.store.evictable or rng.random() < 0.5:
            continue
        leaf = victim(engine.tree)
        first = max(leaf.start, (leaf.end - 1) // page_size * page_size)  # of the tokens in its last page
        tokens, sole = leaf.end - first, engine.store.refs(leaf.pages[-1]) == (False, 1, 0)
        before = engine.tree_hashes()
        assert engine.evict(1) == 1
        assert leaf.parent is None or leaf.end <= first
        if sole:
            freed_at_once += 1
            assert len(before - engine.tree_hashes()) == tokens, "that page was enough"
    assert freed_at_once > 20


@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_an_eviction_frees_what_was_asked_for_or_all(page_size: int) -> None:
    rng = random.Random(page_size)
    engine = Engine(30, page_size)
    asked = 0
    for _ in range(400):
        random_step(engine, rng, [None], longest=5 * page_size + 1)
        if rng.random() < 0.4 and (could := engine.store.evictable):
            n = rng.randint(1, 6)
            assert engine.evict(n) == min(n, could)
            asked += 1
    assert asked > 10


def test_all_is_evicted_in_the_end() -> None:
    store = PageModel(40)
    tree = PrefixTree(store, 4)
    for number in range(8):
        finished(tree, [*range(number), 100 + number], [200 + number] * (number % 5 + 1))
    while store.evictable:
        assert tree.evict(1) == 1
        assert not tree.check_integrity()
    assert (tree.num_nodes, tree.num_tokens, store.free) == (0, 0, 40)
