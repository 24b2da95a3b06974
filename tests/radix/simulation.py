# SPDX-License-Identifier: Apache-2.0
"""An engine in miniature around a PrefixTree, with an oracle that needs no tree.

Every slot of every page holds the hash of the token prefix that it stands for, so a wrong page, a write into a shared
page or a page that was freed too early shows as a wrong hash. The oracle is the set of those hashes that are cached:
insert adds, eviction alone may remove, and what a match must find follows from the set.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_vattn.radix import Node, PrefixTree

from sglang_vattn._core import Pages
from tests.radix.page_model import PageModel


def seed(namespace: Hashable) -> int:
    """The hash of the empty prefix. By repr, since "ab" and b"ab" hash alike."""
    return hash(("namespace", repr(namespace)))


def prefix_hashes(namespace: Hashable, tokens: Iterable[int]) -> list[int]:
    """The hash of each prefix of ``tokens``, the namespace being its root."""
    out, last = [], seed(namespace)
    for token in tokens:
        last = hash((last, token))
        out.append(last)
    return out


class LockstepPages(PageModel):
    """The model and the C++ `Pages` side by side: each call goes to both, each counter must be equal."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.core = Pages(num_pages)

    def take(self, n: int) -> list[int] | None:
        enough = self.count("free") >= n
        pages = self.core.take(n)
        assert (pages is not None) == enough
        assert pages is None or all(self.state(page) == "free" for page in pages)
        self.owned.update(pages or ())
        return pages

    def release(self, pages: Sequence[int]) -> None:
        super().release(pages)
        self.core.release(pages)

    def ref(self, pages: Sequence[int], locked: bool) -> None:
        super().ref(pages, locked)
        self.core.ref(pages, locked)

    def unref(self, pages: Sequence[int], locked: bool) -> None:
        super().unref(pages, locked)
        self.core.unref(pages, locked)

    def lock(self, pages: Sequence[int]) -> None:
        super().lock(pages)
        self.core.lock(pages)

    def unlock(self, pages: Sequence[int]) -> None:
        super().unlock(pages)
        self.core.unlock(pages)

    def count(self, state: str) -> int:
        count = super().count(state)
        assert count == getattr(self.core, state), f"{count} pages are {state}, the core counts otherwise"
        return count


@dataclass(eq=False)
class Request:
    """A running request: ``pages[:shared]`` are the tree's, the rest are its own."""

    namespace: Hashable
    tokens: array[int]  # computed so far
    pages: list[int]
    shared: int
    node: Node  # locked
    inserted_len: int = 0
    hashes: list[int] = field(default_factory=list)


class Engine:
    """Requests over a tree; every method asserts what it can."""

    def __init__(self, num_pages: int, page_size: int, policy: str = "lru") -> None:
        self.size = page_size
        self.store = LockstepPages(num_pages)
        self.tree = PrefixTree(self.store, page_size, policy)
        self.memory: dict[tuple[int, int], int] = {}
        self.cached: set[int] = set()
        self.running: list[Request] = []

    # ------------------------------------------------------------ what a scheduler does

    def match(self, tokens: array[int], namespace: Hashable, limit: int | None = None) -> tuple[int, Node]:
        """A match, checked against the oracle to the token, and against the memory behind it."""
        before = [self.store.count(state) for state in ("free", "private", "evictable", "protected")]
        length, node = self.tree.match(tokens, namespace, limit)
        hashes = prefix_hashes(namespace, tokens[:limit])
        expected = next((n for n, value in enumerate(hashes) if value not in self.cached), len(hashes))
        assert length == expected
        assert node.end == length
        assert before == [self.store.count(state) for state in ("free", "private", "evictable", "protected")]
        self.check_memory(self.tree.path_pages(node, length), hashes[:length])
        return length, node

    def admit(self, tokens: array[int], namespace: Hashable = None, end: int | None = None) -> Request | None:
        """Match, lock, share whole pages, copy the rest of the next, compute up to ``end``; None if it must wait."""
        length, node = self.match(tokens, namespace, len(tokens) - 1)
        self.tree.lock(node)
        shared, rest = divmod(length, self.size)
        path = self.tree.path_pages(node, length)
        request = Request(namespace, tokens[:length], path[:shared], shared, node)
        request.hashes = prefix_hashes(namespace, request.tokens)
        if not self._grow(request, max(length + 1, len(tokens) if end is None else end)):
            self.tree.unlock(node)
            return None
        for offset in range(rest):
            self._write(request, shared * self.size + offset, self.memory[path[shared], offset])
        self.running.append(request)
        self.compute(request, tokens[length:end] or tokens[length : length + 1])
        return request

    def compute(self, request: Request, tokens: array[int]) -> bool:
        """Append ``tokens`` to a running request; False, with nothing computed, if there is no room."""
        if not self._grow(request, len(request.tokens) + len(tokens)):
            return False
        for token in tokens:
            last = request.hashes[-1] if request.hashes else seed(request.namespace)
            request.tokens.append(token)
            request.hashes.append(hash((last, token)))
            self._write(request, len(request.tokens) - 1, request.hashes[-1])
        return True

    def checkpoint(self, request: Request, end: int | None = None) -> None:
        """Insert what is computed, the partial page included, and move the lock to where it ends."""
        tokens = request.tokens[:end]
        expected = next((n for n, h in enumerate(request.hashes[:end]) if h not in self.cached), len(tokens))
        cached, node = self.tree.insert(tokens, request.pages, request.namespace, inserted_len=request.inserted_len)
        assert (cached, node.end) == (expected, len(tokens))
        self.cached.update(request.hashes[:end])
        request.inserted_len = max(request.inserted_len, len(tokens))
        self.tree.lock(node)
        self.tree.unlock(request.node)
        request.node = node

    def leave(self, request: Request, *, checkpoint: bool) -> None:
        """Finish (with a checkpoint) or abort and retract (without)."""
        self.check_memory(request.pages, request.hashes)
        if checkpoint:
            self.checkpoint(request)
        self.store.release(request.pages[request.shared :])
        self.tree.unlock(request.node)
        self.running.remove(request)

    def evict(self, num_pages: int) -> int:
        """Evict, and check that it freed enough or all it could, and nothing that a running request stands on."""
        free = self.store.free
        freed = self.tree.evict(num_pages)
        assert freed == self.store.free - free
        assert freed >= num_pages or self.store.evictable == 0
        left = self.tree_hashes()
        assert left <= self.cached, "eviction invented a string"
        for request in self.running:
            assert left.issuperset(request.hashes[: request.node.end]), "eviction took a locked string"
        self.cached = left
        return freed

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Everything that must hold between two steps."""
        assert not self.tree.check_integrity()
        assert not self.store.core.check_integrity()
        assert self.tree_hashes() == self.cached
        assert self.store.owned == {page for r in self.running for page in r.pages[r.shared :]}
        for request in self.running:
            self.check_memory(request.pages, request.hashes)

    def check_memory(self, pages: Sequence[int], hashes: Sequence[int]) -> None:
        assert len(pages) >= -(-len(hashes) // self.size)
        for n, value in enumerate(hashes):
            page, offset = pages[n // self.size], n % self.size
            assert self.store.state(page) != "free"
            assert self.memory[page, offset] == value, f"token {n} is not in slot {offset} of page {page}"

    def tree_hashes(self) -> set[int]:
        """The hashes of all strings in the tree, each of which must be in the memory of its path."""
        out: set[int] = set()
        stack: list[tuple[Node, int, list[int]]] = [
            (root, seed(namespace), []) for namespace, root in self.tree.root_node.children.items()
        ]
        while stack:
            node, last, hashes = stack.pop()
            hashes = list(hashes)
            for token in node.tokens:
                last = hash((last, token))
                hashes.append(last)
            self.check_memory(self.tree.path_pages(node), hashes)
            out.update(hashes[node.start :])
            stack.extend((child, last, hashes) for child in node.children.values())
        return out

    def _grow(self, request: Request, end: int) -> bool:
        missing = -(-end // self.size) - len(request.pages)
        if missing > self.store.free:
            self.evict(missing - self.store.free)
        pages = self.store.take(max(missing, 0))
        if pages is None:
            return False
        request.pages += pages
        return True

    def _write(self, request: Request, position: int, value: int) -> None:
        index, offset = divmod(position, self.size)
        assert index >= request.shared, "a write into a shared page"
        assert request.pages[index] in self.store.owned
        self.memory[request.pages[index], offset] = value
