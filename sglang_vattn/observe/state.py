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
from collections.abc import Callable, Hashable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang_vattn.allocator import VattnAllocator
    from sglang_vattn.radix import Node, PrefixTree
    from sglang_vattn.request_pages import RequestPages

STATES = ("free", "private", "evictable", "protected", "padding", "guard")
FREE, PRIVATE, EVICTABLE, PROTECTED, PADDING, GUARD = range(len(STATES))
U16, U32 = np.dtype("<u2"), np.dtype("<u4")  # in the order of bytes that the page expects
MAX_NODES = 256  # sent, those nearest to the root first; every page names its node all the same
_KEY = secrets.token_bytes(16)  # of this process


def full_state(
    allocator: VattnAllocator,
    holders: Mapping[int, int],
    packed: Callable[[RequestPages], str],
    lengths: Mapping[int, int],
) -> dict[str, Any]:
    """All of the pool. O(pages + nodes + pages of all rows).

    Parameters
    ----------
    holders
        How many running requests hold a page by alias.
    packed
        :func:`pack_pages` of a request's shared pages, which never change.
    lengths
        Tokens of each running request, by its ``req_pool_idx``.
    """
    total = allocator.pages.num_pages + 2
    states = np.zeros(total, dtype=np.uint8)
    nodes = np.zeros(total, dtype=U32)
    sharers = np.zeros(total, dtype=U16)
    tree = allocator.tree_cache.tree if allocator.tree_cache is not None else None
    walk = list(tree.walk()) if tree is not None else []  # parents before children
    if walk:
        _mark_tree(walk, states, nodes)
    for request in (*allocator.requests.values(), *allocator.admitted.values()):
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
        **_rows(allocator, packed, lengths),
        "tree": _top_nodes(tree, walk) if tree is not None else [],
    }


def check(allocator: VattnAllocator, states: str) -> list[str]:
    """What is wrong in the core, or in ``states`` against the core's own word for each page. For tests; slow."""
    problems = [*allocator.pages.check_integrity(), *allocator.get_kvcache().space.check_integrity()]
    if allocator.tree_cache is not None:
        problems += allocator.tree_cache.tree.check_integrity()
    guard = allocator.get_kvcache().home_tokens[:, (allocator.pages.num_pages + 1) * allocator.page_size :]
    if bool(guard.any()):
        problems.append("the guard page was written to")
    shown = base64.b64decode(states)
    for page in range(1, allocator.pages.num_pages + 1):
        if STATES[shown[page]] != (state := allocator.pages.state(page)):
            problems.append(f"page {page} is shown as {STATES[shown[page]]}, the core says {state}")
    return problems


def _mark_tree(walk: list[Node], states: np.ndarray, nodes: np.ndarray) -> None:
    """A page of several nodes is protected if any is locked; it is shown as the deepest one's (the last in a walk)."""
    locked = [page for node in walk if node.lock for page in node.pages]
    held = [page for node in walk for page in node.pages]
    states[held] = EVICTABLE
    states[locked] = PROTECTED
    nodes[held] = np.repeat([node.serial for node in walk], [len(node.pages) for node in walk])


def _rows(
    allocator: VattnAllocator, packed: Callable[[RequestPages], str], lengths: Mapping[int, int]
) -> dict[str, Any]:
    """The running requests. ``prefix`` is an index into ``prefixes``: equal lists of shared pages are sent once.

    ``pages`` are the request's own, then those reserved ahead (uint32, as in ``prefixes``).
    """
    space = allocator.get_kvcache().space
    prefixes: dict[str, int] = {}
    rows = [
        {
            "slot": slot,
            "row": request.row,
            "tokens": lengths.get(slot, 0),
            "shared": request.shared,
            "copied": request.copied_tokens,
            "ahead": len(request.ahead),
            "mapped": space.ready(request.row) if request.row else 0,
            "ready": int(allocator.rows.ready(request)),
            "prefix": prefixes.setdefault(packed(request), len(prefixes)),
            "pages": pack_pages(request.pages[request.shared :] + request.ahead),
        }
        for slot, request in sorted(allocator.requests.items())
    ]
    return {"rows": rows, "prefixes": list(prefixes)}


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


def pack_pages(pages: list[int]) -> str:
    """Page numbers as base64 of uint32."""
    return _pack(np.array(pages, dtype=U32))


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
