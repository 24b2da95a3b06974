# SPDX-License-Identifier: Apache-2.0
"""In which order leaves are evicted: stock SGLang's policies over counters, in a lazily updated heap.

A policy is a rank; within a rank the least recently used leaf goes first. Times are the tree's clock, a counter that
ticks once an operation, so every tensor-parallel rank evicts the same leaf (stock's classic tree reads a clock).

The heap. Scanning all leaves, as stock does on each call, costs O(leaves) for every page that decode evicts. Here an
entry (rank, used, serial, node) is pushed when a node *becomes* evictable and checked when it surfaces:

    no longer evictable (locked, has children, gone)   drop it; whatever undoes that offers the node again
    rank or used have grown since                      put it back where it belongs now
    as pushed                                          this is the next victim

That is right because both keys of every policy here only ever grow: an entry is never *behind* its node's true place,
so the first entry that is up to date is the true minimum. Invariants: a node has at most one entry (``node.queued``),
every evictable node has one. The heap never outgrows the number of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .node import Node

Rank = Callable[[Node], int]

POLICIES = ("lru", "lfu", "slru", "priority")

# Policies of stock SGLang that we refuse, each with the reason that the error gives.
_REFUSED = {
    "tlru": "its rank falls when a node is split (stock derives it from the length of the node), "
    "and the eviction queue relies on ranks that never fall",
    "fifo": "not implemented",
    "mru": "its order falls with every access, and the eviction queue relies on orders that never fall",
    "filo": "not implemented",
}


def make_rank(policy: str, protected_threshold: int) -> Rank:
    """The rank function of ``policy``; ValueError names the known ones, or why a known one is refused."""
    match policy:
        case "lru":
            return lambda node: 0
        case "lfu":
            return lambda node: node.hits
        case "slru":  # probationary leaves go before protected ones
            return lambda node: int(node.hits >= protected_threshold)
        case "priority":
            return lambda node: node.priority
    reason = _REFUSED.get(policy, "unknown")
    raise ValueError(f"eviction policy {policy!r}: {reason}; choose one of {', '.join(POLICIES)}")


class EvictionQueue:
    """The evictable leaves, next victim first. Reads nodes; writes only ``node.queued``."""

    __slots__ = ("_heap", "rank")

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._heap: list[tuple[int, int, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Call when ``node`` may have become evictable. O(log n); does nothing if it is not, or is queued."""
        if not node.queued and node.is_evictable:
            node.queued = True
            heapq.heappush(self._heap, (self.rank(node), node.used, node.serial, node))

    def pop(self) -> Node | None:
        """Remove and return the next victim, None if no leaf is evictable. The caller must evict it or offer it again.

        O(log n), plus O(log n) for each entry that went stale; an access makes at most the leaves of one path stale.
        """
        heap = self._heap
        while heap:
            rank, used, serial, node = heap[0]
            if not node.is_evictable:
                heapq.heappop(heap)
                node.queued = False
                continue
            now = self.rank(node)
            if now != rank or node.used != used:
                heapq.heapreplace(heap, (now, node.used, serial, node))
                continue
            heapq.heappop(heap)
            node.queued = False
            return node
        return None

    def clear(self) -> None:
        """Forget all entries. O(n)."""
        for *_, node in self._heap:
            node.queued = False
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[int, int, int, Node]]:
        """The entries (rank, used, serial, node) in no order, stale ones included; for checks."""
        return iter(self._heap)
