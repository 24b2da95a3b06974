# SPDX-License-Identifier: Apache-2.0
"""The prefix tree for the page: which node each page belongs to, and the nodes nearest to the root."""

from __future__ import annotations

import secrets
import time
from collections.abc import Hashable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_vattn.observe.page_states import FREE, PRIVATE

if TYPE_CHECKING:
    from sglang_vattn.allocator import VattnAllocator
    from sglang_vattn.radix import Node, PrefixTree

MAX_NODES = 256  # sent, those nearest to the root first; every page names its node all the same
SHARE = 0.002  # of the scheduler's time, at most, for walks over the tree
_KEY = secrets.token_bytes(16)  # of this process


class TreeView:
    """What a walk over the tree last found. Renewed when the tree has changed, but a large one not at every look.

    Attributes
    ----------
    top : the nodes to be sent, parents first
    age_s : how long ago the tree was as it is shown; 0 if it still is
    """

    def __init__(self, share: float = SHARE) -> None:
        self.top: list[dict[str, Any]] = []
        self.age_s = 0.0
        self._share = share
        self._seen: tuple[int, ...] = ()
        self._seen_s = self._due_s = 0.0
        self._nodes, self._private = np.zeros(0, dtype="<u4"), np.zeros(0, dtype=bool)

    def renew(self, allocator: VattnAllocator, states: np.ndarray) -> None:
        """Walk over the tree, if it has changed and the last walk is paid for. ``states``: of each page, uint8."""
        tree = allocator.tree_cache.tree if allocator.tree_cache is not None else None
        now = time.monotonic()
        seen = () if tree is None else (tree.clock, tree.num_nodes, tree.num_tokens, tree.root_node.lock)
        unchanged = len(self._nodes) == len(states) and seen == self._seen
        if unchanged or (now < self._due_s and tree is not None and tree.num_nodes > 0):
            self.age_s = 0.0 if unchanged else now - self._seen_s
            return
        began = time.thread_time()
        walk = list(tree.walk()) if tree is not None else []  # parents before children
        # A page of several nodes is shown as the deepest one's, the last in a walk.
        self._nodes = np.zeros(len(states), dtype="<u4")
        if walk:
            pages = [page for node in walk for page in node.pages]
            self._nodes[pages] = np.repeat([node.serial for node in walk], [len(node.pages) for node in walk])
        self._private = states == PRIVATE
        self.top = _top_nodes(tree, walk) if tree is not None else []
        self._seen, self._seen_s, self.age_s = seen, now, 0.0
        self._due_s = now + (time.thread_time() - began) / self._share

    def nodes_of(self, states: np.ndarray) -> np.ndarray:
        """The serial of each page's node at the last walk, uint32; 0 for a page that is free, or a request's by now.

        A page that has gone from one node to another meanwhile is still shown as the first one's.
        """
        gone = (states == FREE) | ((states == PRIVATE) & ~self._private)
        return np.where(gone, 0, self._nodes).astype(self._nodes.dtype)


def _top_nodes(tree: PrefixTree, walk: list[Node]) -> list[dict[str, Any]]:
    """Up to ``MAX_NODES`` nodes, parents first, siblings by what hangs on them; ``below`` counts those left out."""
    tokens_below: dict[Node, int] = {}
    nodes_below: dict[Node, int] = {}
    for node in reversed(walk):
        tokens, nodes = len(node.tokens), 0
        for child in node.children.values():
            tokens += tokens_below[child]
            nodes += 1 + nodes_below[child]
        tokens_below[node], nodes_below[node] = tokens, nodes
    roots = list(tree.root_node.children.values())
    tenants: dict[Node | None, str] = {root: keyed_hash(root.namespace) for root in roots}
    level = [child for root in roots for child in root.children.values()]
    chosen: dict[Node, None] = {}
    while level and len(chosen) < MAX_NODES:
        level.sort(key=lambda node: (-node.lock, -tokens_below[node]))
        level = level[: MAX_NODES - len(chosen)]
        for node in level:
            tenants[node] = tenants[node.parent]
            chosen[node] = None
        level = [child for node in level for child in node.children.values()]
    return [
        {
            "id": node.serial,
            "parent": node.parent.serial if node.parent is not None and node.parent in chosen else 0,
            "namespace": tenants[node],
            "start": node.start,
            "end": node.end,
            "pages": len(node.pages),
            "hits": node.hits,
            "locks": node.lock,
            "below": nodes_below[node]
            - sum(1 + nodes_below[each] for each in node.children.values() if each in chosen),
            "tokens_below": tokens_below[node],
        }
        for node in chosen
    ]


def keyed_hash(namespace: Hashable) -> str:
    """Six hex digits that tell namespaces apart and cannot be guessed back; "" for the default one."""
    if namespace in (None, ("", "", "")):
        return ""
    return blake2b(repr(namespace).encode(), key=_KEY, digest_size=3).hexdigest()
