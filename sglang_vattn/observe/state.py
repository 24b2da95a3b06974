# SPDX-License-Identifier: Apache-2.0
"""Every page, row and (top) node as compact plain data for the page, ``top`` and ``snapshot``.

Numbers only: no text, no token, no request's id. Tenants appear as keyed hashes that mean nothing elsewhere.

Arrays are base64 of little-endian integers, one per page 0..num_pages + 1 (the padding page first, the guard page
last)::

    states   uint8    index into STATES
    nodes    uint32   the tree node whose prefix the page holds, 0 for none
    sharers  uint16   running requests that hold it by alias
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Hashable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang_vattn.allocator import VattnAllocator
    from sglang_vattn.radix import Node, PrefixTree

STATES = ("free", "private", "evictable", "protected", "padding", "guard")
FREE, PRIVATE, EVICTABLE, PROTECTED, PADDING, GUARD = range(len(STATES))
MAX_NODES = 256  # sent, those nearest to the root first; every page names its node all the same
_KEY = secrets.token_bytes(16)  # of this process


def full_state(allocator: VattnAllocator, holders: Mapping[int, int], lengths: Mapping[int, int]) -> dict[str, Any]:
    """All of the pool. O(pages + nodes + pages of all rows).

    Parameters
    ----------
    holders
        How many running requests hold a page by alias.
    lengths
        Tokens of each running request, by its ``req_pool_idx``.
    """
    total = allocator.pages.num_pages + 2
    states = np.zeros(total, dtype=np.uint8)
    nodes = np.zeros(total, dtype=np.uint32)
    sharers = np.zeros(total, dtype=np.uint16)
    tree = allocator.tree_cache.tree if allocator.tree_cache is not None else None
    if tree is not None:
        _mark_tree(tree, states, nodes)
    running = [*allocator.requests.values(), *allocator.admitted.values()]
    for request in running:
        states[request.pages[request.shared :]] = PRIVATE  # RELEASED is page 0, set below
    states[0], states[-1] = PADDING, GUARD
    held = [(page, min(count, 0xFFFF)) for page, count in holders.items() if count > 0]
    if held:
        pages, counts = zip(*held, strict=True)
        sharers[list(pages)] = counts
    return {
        "states": _pack(states),
        "nodes": _pack(nodes),
        "sharers": _pack(sharers),
        "rows": _rows(allocator, lengths),
        "tree": _top_nodes(tree) if tree is not None else [],
    }


def check(allocator: VattnAllocator, states: str) -> list[str]:
    """What is wrong in the core, or in ``states`` against the core's own word for each page. For tests; slow."""
    problems = [*allocator.pages.check_integrity(), *allocator.get_kvcache().space.check_integrity()]
    if allocator.tree_cache is not None:
        problems += allocator.tree_cache.tree.check_integrity()
    shown = base64.b64decode(states)
    for page in range(1, allocator.pages.num_pages + 1):
        if STATES[shown[page]] != (state := allocator.pages.state(page)):
            problems.append(f"page {page} is shown as {STATES[shown[page]]}, the core says {state}")
    return problems


def _mark_tree(tree: PrefixTree, states: np.ndarray, nodes: np.ndarray) -> None:
    """A page of several nodes is protected if any is locked; it is shown as the deepest one's."""
    for node in tree.walk():
        nodes[node.pages] = node.serial
        states[node.pages] = np.maximum(states[node.pages], PROTECTED if node.lock else EVICTABLE)


def _rows(allocator: VattnAllocator, lengths: Mapping[int, int]) -> list[dict[str, Any]]:
    """The running requests: ``pages`` (uint32) are the shared ones, its own, then those reserved ahead."""
    space = allocator.get_kvcache().space
    return [
        {
            "slot": slot,
            "row": request.row,
            "tokens": lengths.get(slot, 0),
            "shared": request.shared,
            "copied": request.copied_tokens,
            "ahead": len(request.ahead),
            "mapped": space.ready(request.row) if request.row else 0,
            "ready": int(allocator.rows.ready(request)),
            "pages": _pack(np.asarray(request.pages + request.ahead, dtype=np.uint32)),
        }
        for slot, request in sorted(allocator.requests.items())
    ]


def _top_nodes(tree: PrefixTree) -> list[dict[str, Any]]:
    """Up to ``MAX_NODES`` nodes, parents first, siblings by what hangs on them; ``below`` counts those left out."""
    parents_first = list(tree.walk())
    tokens_below: dict[Node, int] = {}
    nodes_below: dict[Node, int] = {}
    for node in reversed(parents_first):
        tokens_below[node] = len(node.tokens) + sum(tokens_below[child] for child in node.children.values())
        nodes_below[node] = sum(1 + nodes_below[child] for child in node.children.values())
    level = [child for root in tree.root_node.children.values() for child in root.children.values()]
    chosen: list[Node] = []
    while level and len(chosen) < MAX_NODES:
        level.sort(key=lambda node: (-node.lock, -tokens_below[node]))
        chosen += level[: MAX_NODES - len(chosen)]
        level = [child for node in level for child in node.children.values()]
    shown = set(chosen)
    return [
        {
            "id": node.serial,
            "parent": node.parent.serial if node.parent in shown and node.parent is not None else 0,
            "namespace": _namespace(node),
            "start": node.start,
            "end": node.end,
            "pages": len(node.pages),
            "hits": node.hits,
            "locks": node.lock,
            "below": nodes_below[node] - sum(1 + nodes_below[c] for c in node.children.values() if c in shown),
            "tokens_below": tokens_below[node],
        }
        for node in chosen
    ]


def _namespace(node: Node) -> str:
    above = node
    while above.parent is not None and above.namespace is None:
        above = above.parent
    return keyed_hash(above.namespace)


def keyed_hash(namespace: Hashable) -> str:
    """Six hex digits that tell namespaces apart and cannot be guessed back; "" for the default one."""
    if namespace in (None, ("", "", "")):
        return ""
    return blake2b(repr(namespace).encode(), key=_KEY, digest_size=3).hexdigest()


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).decode()
