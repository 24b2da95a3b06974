# SPDX-License-Identifier: Apache-2.0
"""In which order leaves are evicted: stock SGLang's policies over counters, in a lazily updated heap.

A policy is a rank; within a rank the least recently used leaf goes first. Times are the tree's clock, a counter that
ticks once an operation, so every tensor-parallel rank evicts the same leaf (stock's classic tree reads a clock).

Tails. A leaf that ends inside a page has a *tail*, its last page, if nothing ever went on from there to a further page
and less than half of the page is the parent's: most often the end of an answer, which costs a page, half empty, and
which nobody came back to. Within a rank leaves with a tail come first, and lose it alone: then they end at a page's end
and take their turn. Stock with pages never keeps that rest; here it stays until its page is needed. Half a page or more
of a prompt is worth its page: prompts are asked again, to the token (measured: docs/benchmarks.md). At page size 1
there are no tails.

The heap. Scanning all leaves, as stock does on each call, costs O(leaves) for every page that decode evicts. Here an
entry (rank, no tail, used, serial, node) is pushed when a node *becomes* evictable and checked when it surfaces:

    no longer evictable (locked, has children, gone)   drop it; whatever undoes that offers the node again
    its place has moved since                          put it back where it belongs now
    as pushed                                          this is the next victim

That is right because all keys of every policy here only ever grow: an entry is never *behind* its node's true place,
so the first entry that is up to date is the true minimum. Invariants: a node has at most one entry (``node.queued``),
every evictable node has one. The heap never outgrows the number of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .node import Node

Rank = Callable[[Node], int]
Place = tuple[int, bool, int, int]  # rank, no tail, used, serial (unique: nodes themselves are never compared)

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

    __slots__ = ("_heap", "page_size", "rank")

    def __init__(self, rank: Rank, page_size: int) -> None:
        self.rank = rank
        self.page_size = page_size
        self._heap: list[tuple[Place, Node]] = []

    def has_tail(self, leaf: Node) -> bool:
        """Whether its last page is filled in part, hardly its parent's, and nothing went on from there."""
        rest = leaf.end % self.page_size
        of_parent = leaf.start - (leaf.end - rest)  # tokens of that page; negative if the leaf has pages before
        return rest > 0 and not leaf.continued and 2 * of_parent < self.page_size

    def place(self, node: Node) -> Place:
        """Where the leaf stands in the order of eviction; the smallest goes first. No part of it ever falls."""
        return self.rank(node), not self.has_tail(node), node.used, node.serial

    def offer(self, node: Node) -> None:
        """Call when ``node`` may have become evictable. O(log n); does nothing if it is not, or is queued."""
        if not node.queued and node.is_evictable:
            node.queued = True
            heapq.heappush(self._heap, (self.place(node), node))

    def pop(self) -> Node | None:
        """Remove and return the next victim, None if no leaf is evictable. The caller must evict it or offer it again.

        O(log n), plus O(log n) for each entry that went stale; an access makes at most the leaves of one path stale.
        """
        heap = self._heap
        while heap:
            queued_at, node = heap[0]
            if not node.is_evictable:
                heapq.heappop(heap)
                node.queued = False
                continue
            place = self.place(node)
            if place != queued_at:
                heapq.heapreplace(heap, (place, node))
                continue
            heapq.heappop(heap)
            node.queued = False
            return node
        return None

    def clear(self) -> None:
        """Forget all entries. O(n)."""
        for _, node in self._heap:
            node.queued = False
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[Place, Node]]:
        """The entries in no order, stale ones included; for checks."""
        return iter(self._heap)
