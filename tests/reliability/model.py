# SPDX-License-Identifier: Apache-2.0
"""The trivially true model: which token prefixes are cached, and the hash that stands for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from sglang_vattn.radix import Node, PrefixTree

Namespace: TypeAlias = "tuple[str | None, str | None, str | None]"  # extra key, LoRA id, cache salt


class Job(NamedTuple):
    """A request as it arrives."""

    tokens: tuple[int, ...]
    new_tokens: int = 4  # what admission reserves for its output
    namespace: Namespace = (None, None, None)
    priority: int = 0


def seed(namespace: Namespace) -> int:
    """The hash of the empty prefix. None and "" are the same to SGLang, in each place."""
    return hash(("namespace", tuple(part or "" for part in namespace)))


def chain(last: int, tokens: Iterable[int]) -> list[int]:
    """The hash of each prefix, going on from the hash ``last``; 63 bits, so that its complement differs in sign."""
    out = []
    for token in tokens:
        last = hash((last, token))
        out.append(last)
    return out


class Model:
    """The set of cached prefixes: checkpoints add to it, eviction alone may take away."""

    def __init__(self, tree: PrefixTree, page_size: int) -> None:
        self.tree, self.size = tree, page_size
        self.cached: set[int] = set()
        self.slot_hashes: np.ndarray[Any, Any] = np.empty(0, dtype=np.int64)

    def expected_hit(self, hashes: Sequence[int], limit: int) -> int:
        """How long a hit must be, to the token. What eviction took is learnt from the tree, once it has taken."""
        self.learn_evictions()
        return next((n for n, value in enumerate(hashes[:limit]) if value not in self.cached), limit)

    def learn_evictions(self) -> None:
        if len(self.cached) == self.tree.num_tokens:  # each token of the tree is the end of one cached prefix
            return
        left = self.tree_hashes()
        assert left <= self.cached, "the tree has a prefix that nobody put there"
        self.cached = left

    def check_path(self, pages: Sequence[int], hashes: Sequence[int]) -> None:
        """The slots of these pages hold these hashes."""
        positions = np.arange(len(hashes))
        slots = np.asarray(pages, dtype=np.int64)[positions // self.size] * self.size + positions % self.size
        assert (self.slot_hashes[slots] == hashes).all(), "a cached prefix has lost its content"

    def tree_hashes(self) -> set[int]:
        """The hashes of all prefixes in the tree, each compared with the memory behind it."""
        out: set[int] = set()
        stack: list[tuple[Node, list[int], int]] = [
            (root, [], seed(key)) for key, root in self.tree.root_node.children.items()
        ]
        while stack:
            node, above, last = stack.pop()
            hashes = [*above, *chain(last, node.tokens)]
            if not node.children:
                self.check_path(self.tree.path_pages(node), hashes)
            out.update(hashes[node.start :])
            stack.extend((child, hashes, hashes[-1] if hashes else last) for child in node.children.values())
        return out
