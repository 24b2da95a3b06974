# SPDX-License-Identifier: Apache-2.0
"""Which requests of a decode batch read a common prefix, and whether to read it once for all of them.

Requests share a prefix where their lists of pages begin alike, so the groups come from a radix tree over page
numbers. A request joins it once, with the pages that are full when it first decodes (full pages are never written
again); nothing here walks a path a step.

::

    pages of      A: 1 2 3 7      B: 1 2 3 8 9      C: 1 2 4
    tree          [1 2] - [3] - [7] A
                     |     \\--- [8 9] B
                      \\-- [4] C

A group is one node: its requests attend to the node's path once, and each to the rest of its own. Nested nodes
exclude each other; which level is taken follows from what each would save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sglang_vattn.request_pages import RequestPages


class PathNode:
    """A run of pages that the same requests share, and below it those that go on differently."""

    __slots__ = ("children", "end", "pages", "parent", "passing", "requests", "row")

    def __init__(self, parent: PathNode | None, pages: list[int], end: int) -> None:
        self.parent = parent
        self.pages = pages
        self.end = end  # pages from the root to the end of this node
        self.children: dict[int, PathNode] = {}
        self.requests: dict[RequestPages, None] = {}  # that end here, in the order they came (a set has none)
        self.passing = 0  # requests that end here or below
        self.row = 0  # a row that holds the path and nothing else, 0 while there is none

    def path(self) -> list[int]:
        """All pages from the root to the end of this node."""
        above = self.parent.path() if self.parent is not None else []
        return above + self.pages

    def below(self) -> Iterator[RequestPages]:
        """The requests that share the path to this node."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield from node.requests
            stack.extend(node.children.values())


class Group(NamedTuple):
    """Requests, by their index in the batch, that read ``node``'s path together."""

    node: PathNode
    members: list[int]

    @property
    def saved_pages(self) -> int:
        """Pages that are not read again: once a member but the first."""
        return (len(self.members) - 1) * self.node.end


class SharedPaths:
    """The radix tree of running requests' pages. O(path / page run) to join, O(depth) to leave."""

    def __init__(self) -> None:
        self.root = PathNode(None, [], 0)
        self.version = 0  # changes with the tree
        self._ends: dict[RequestPages, PathNode] = {}
        self.vanished: list[int] = []  # rows of nodes that are gone; whoever gave them out takes them back

    def __contains__(self, request: RequestPages) -> bool:
        return request in self._ends

    def join(self, request: RequestPages, full_pages: int) -> None:
        """Enter a request with its first ``full_pages`` pages; no-op if it is in."""
        if request in self._ends:
            return
        pages, node, at = request.pages[:full_pages], self.root, 0
        while at < full_pages:
            child = node.children.get(pages[at])
            if child is None:
                child = node.children[pages[at]] = PathNode(node, pages[at:], full_pages)
                node, at = child, full_pages
                break
            common = _common(child.pages, pages, at)
            if common < len(child.pages):
                child = self._split(child, common)
            node, at = child, at + common
        node.requests[request] = None
        self._ends[request] = node
        self.version += 1
        self._count(node, 1)

    def leave(self, request: RequestPages) -> None:
        """Take a request out; nodes that nobody passes any more go with it."""
        node = self._ends.pop(request, None)
        if node is None:
            return
        del node.requests[request]
        self.version += 1
        self._count(node, -1)
        while node.parent is not None and not node.requests and not node.children:
            if node.row:
                self.vanished.append(node.row)
            del node.parent.children[node.pages[0]]
            node = node.parent

    def groups(self, batch: Sequence[RequestPages], *, least_members: int, least_pages: int) -> list[Group]:
        """The groups of this batch that save most, each of at least ``least_members`` and ``least_pages`` saved.

        A node is taken if it saves more than the best choice among its children. Only nodes that several requests
        pass are looked at: O(children of the root + members x depth of what is shared).
        """
        at = {request: index for index, request in enumerate(batch)}

        def best(node: PathNode) -> tuple[int, list[Group]]:
            below = [best(child) for child in node.children.values() if child.passing >= least_members]
            apart = (sum(saved for saved, _ in below), [group for _, groups in below for group in groups])
            if node is self.root:
                return apart
            whole = Group(node, sorted(at[request] for request in node.below() if request in at))
            worth = len(whole.members) >= least_members and whole.saved_pages >= least_pages
            return (whole.saved_pages, [whole]) if worth and whole.saved_pages > apart[0] else apart

        return best(self.root)[1]

    def nodes(self) -> Iterator[PathNode]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _split(self, child: PathNode, at: int) -> PathNode:
        """Cut ``child`` after its first ``at`` pages; the lower part keeps its row, requests and children."""
        assert child.parent is not None
        upper = PathNode(child.parent, child.pages[:at], child.end - len(child.pages) + at)
        child.parent.children[child.pages[0]] = upper
        child.pages = child.pages[at:]
        child.parent = upper
        upper.children[child.pages[0]] = child
        upper.passing = child.passing
        return upper

    @staticmethod
    def _count(node: PathNode | None, change: int) -> None:
        while node is not None:
            node.passing += change
            node = node.parent


def _common(a: list[int], b: list[int], b_start: int) -> int:
    length = min(len(a), len(b) - b_start)
    if a[:length] == b[b_start : b_start + length]:
        return length
    return next(i for i in range(length) if a[i] != b[b_start + i])
