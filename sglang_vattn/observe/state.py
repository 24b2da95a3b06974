# SPDX-License-Identifier: Apache-2.0
"""Every page, row and (top) node as compact plain data for the page, ``top`` and ``snapshot``.

Numbers only: no text, no token, no request's id. Tenants appear as keyed hashes that mean nothing elsewhere.

Arrays are base64 of little-endian integers, one per page 0..num_pages + 1 (the padding page first, the guard page
last)::

    states   uint8    index into page_states.STATES
    nodes    uint32   the tree node whose prefix the page holds, 0 for none
    sharers  uint16   running requests that hold it by alias
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_vattn.observe.page_states import EVICTABLE, FREE, GUARD, PADDING, PRIVATE, PROTECTED, STATES
from sglang_vattn.observe.tree_view import TreeView

if TYPE_CHECKING:
    from sglang_vattn.allocator import VattnAllocator
    from sglang_vattn.request_pages import RequestPages

U16, U32 = np.dtype("<u2"), np.dtype("<u4")  # in the order of bytes that the page expects


def full_state(
    allocator: VattnAllocator,
    tree: TreeView,
    holders: Mapping[int, int],
    packed: Callable[[RequestPages], str],
    lengths: Mapping[int, int],
) -> dict[str, Any]:
    """All of the pool. O(pages of all rows), and now and then O(nodes): see :class:`TreeView`.

    Parameters
    ----------
    tree
        The prefix tree as it was seen last.
    holders
        How many running requests hold a page by alias.
    packed
        :func:`pack_pages` of a request's shared pages, which never change.
    lengths
        Tokens of each running request, by its ``req_pool_idx``.
    """
    total = allocator.pages.num_pages + 2
    states = np.empty(total, dtype=np.uint8)
    states[:-1] = np.frombuffer(allocator.pages.states(), dtype=np.uint8)  # the core numbers them alike
    states[0], states[-1] = PADDING, GUARD
    sharers = np.zeros(total, dtype=U16)
    tree.renew(allocator, states)
    held = [(page, min(count, 0xFFFF)) for page, count in holders.items() if count > 0]
    if held:
        pages, counts = zip(*held, strict=True)
        sharers[list(pages)] = counts
    return {
        "states": _pack(states),
        "nodes": _pack(tree.nodes_of(states)),
        "sharers": _pack(sharers),
        **_rows(allocator, packed, lengths),
        "tree": tree.top,
        "tree_age_s": round(tree.age_s, 1),
    }


def check(allocator: VattnAllocator, states: str) -> list[str]:
    """What is wrong in the core, or in ``states`` against what requests and tree hold. For tests; slow."""
    problems = [*allocator.pages.check_integrity(), *allocator.get_kvcache().space.check_integrity()]
    if allocator.tree_cache is not None:
        problems += allocator.tree_cache.tree.check_integrity()
    guard = allocator.get_kvcache().home_tokens[:, (allocator.pages.num_pages + 1) * allocator.page_size :]
    if bool(guard.any()):
        problems.append("the guard page was written to")
    right = dict.fromkeys(range(1, allocator.pages.num_pages + 1), FREE)
    for node in allocator.tree_cache.tree.walk() if allocator.tree_cache is not None else ():
        state = PROTECTED if node.lock else EVICTABLE
        right.update((page, max(state, right[page])) for page in node.pages)
    for request in (*allocator.requests.values(), *allocator.admitted.values()):
        right.update((page, PRIVATE) for page in request.pages[request.shared :] if page)  # RELEASED is page 0
    shown = base64.b64decode(states)
    for page, state in right.items():
        if shown[page] != state:
            problems.append(f"page {page} is shown as {STATES[shown[page]]}, and is {STATES[state]}")
    return problems


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


def pack_pages(pages: list[int]) -> str:
    """Page numbers as base64 of uint32."""
    return _pack(np.array(pages, dtype=U32))


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
