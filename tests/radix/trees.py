# SPDX-License-Identifier: Apache-2.0
"""Small trees to test with."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from sglang_vattn.radix import Node, PrefixTree

from tests.radix.page_model import PageModel, take


def tree_with(page_size: int, *sequences: Iterable[int], policy: str = "lru") -> PrefixTree:
    """A tree over 64 pages that holds ``sequences``, each in pages of its own, without owners."""
    tree = PrefixTree(PageModel(64), page_size, policy)
    for sequence in sequences:
        cache(tree, sequence)
    return tree


def cache(tree: PrefixTree, sequence: Iterable[int], namespace: Hashable = None, priority: int = 0) -> Node:
    """Insert ``sequence`` as a finished request does: its pages lose their owner."""
    tokens = list(sequence)
    pages = take(tree.store, -(-len(tokens) // tree.page_size))
    node = tree.insert(tokens, pages, namespace, priority).node
    tree.store.release(pages)
    assert not tree.check_integrity()
    return node


def hit(tree: PrefixTree, tokens: Iterable[int], namespace: Hashable = None) -> int:
    """Length of the match."""
    return tree.match(list(tokens), namespace).length
