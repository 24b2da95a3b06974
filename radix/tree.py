# SPDX-License-Identifier: Apache-2.0
"""The prefix tree's operations. The algorithm, its invariant and its costs are drawn in the package's docstring."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from sglang_vattn._core import common_prefix

from .eviction import EvictionQueue, make_rank
from .inspection import check_integrity, pretty
from .node import Match, Node, as_tokens

if TYPE_CHECKING:
    from .node import Tokens, TokensLike
    from .pages import PageStore


class PrefixTree:
    """Tokens are array('q'); any int64 buffer or iterable is copied.

    Locking: only `lock` pins anything. A node returned by `match` or `insert` may be cut short or evicted by the next
    `evict` unless the caller locks it first; every other call leaves handles valid.
    """

    def __init__(self, pages: PageStore, page_size: int, policy: str = "lru", *, protected_threshold: int = 2) -> None:
        """An empty tree. ``protected_threshold``: the hits from which slru protects a leaf (stock's default is 2).

        Raises ValueError for a page size below 1, or a policy that is not one of `POLICIES`.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.store = pages
        self.page_size = page_size
        self.policy = policy
        self.clock = 0  # ticks on every access and creation; orders them, on every rank alike
        self.num_nodes = 0  # nodes that hold tokens
        self.num_tokens = 0  # tokens of all nodes
        self.queue = EvictionQueue(make_rank(policy, protected_threshold), page_size)
        self.root_node = Node(None, array("q"), 0, [], used=0, serial=0)

    # ---------------------------------------------------------------- look up and grow

    def match(self, tokens: TokensLike, namespace: Hashable = None, limit: int | None = None) -> Match:
        """The longest cached prefix of ``tokens[:limit]``.

        Mutates: stamps the path as accessed; splits a node that holds more, so that the match's node ends where the
        match does. Page references follow the split, but no page is allocated and no counter of the store changes.
        It raises no priority, as in stock: what waits does not promote what it would hit, only `insert` does.
        O(matched tokens + one node). Raises ValueError for a negative limit.
        """
        node, length = self._walk(as_tokens(tokens), namespace, limit, split=True)
        return Match(length, node if length else self.root_node)

    def touch(self, tokens: TokensLike, namespace: Hashable = None, limit: int | None = None) -> None:
        """Stamp what `match` would hit as accessed, without splitting.

        A node hit in part is stamped whole. Stock splits there, so its second touch would spare the rest of the node.
        """
        self._walk(as_tokens(tokens), namespace, limit, split=False)

    def path_pages(self, node: Node, length: int | None = None) -> list[int]:
        """The pages of tokens [0, ``length``) on the path to ``node``, ceil(length / page_size) of them, in order.

        ``length`` defaults to ``node.end``. Mutates nothing; lock the node for as long as the pages are used.
        O(pages + depth). Raises ValueError if the node was evicted or ends before ``length``.
        """
        self._require_live(node)
        if length is None:
            length = node.end
        if not 0 <= length <= node.end:
            raise ValueError(f"length {length} is not on the path: the node ends at {node.end}")
        high = self._ceil(length)  # pages from here on are known
        out = [0] * high
        above: Node | None = node
        while high and above is not None:
            low = above.start // self.page_size
            if low < high and above.pages:
                out[low:high] = above.pages[: high - low]
                high = low
            above = above.parent
        return out

    def insert(
        self,
        tokens: TokensLike,
        pages: Sequence[int],
        namespace: Hashable = None,
        priority: int = 0,
        *,
        inserted_len: int = 0,
    ) -> Match:
        """Cache ``tokens`` (a whole sequence, from its start) in ``pages`` (those of the request's row, in order).

        What the tree has stays as it is; a new leaf takes the suffix and refers to the pages that the suffix touches.
        Returns (length that was cached before, node that ends at ``len(tokens)``).

        Caller: every page in ``pages`` from the first uncached token's on must hold the sequence from the page's first
        token, and must not be written below ``len(tokens)`` any more. The caller keeps its ownership of the pages.
        ``inserted_len``: how much of it this same request inserted before; only nodes that end beyond it count a hit
        (stock: ``req.kv.cache_inserted_len``), so that a chunked prefill does not look popular.
        Mutates: stamps the path, may split, adds at most one node, raises priorities to ``priority``.
        O(tokens), copying only the suffix. Raises ValueError, with nothing changed, if ``pages`` is too short.
        """
        tokens = as_tokens(tokens)
        end = len(tokens)
        if len(pages) < self._ceil(end):
            raise ValueError(f"{end} tokens need {self._ceil(end)} pages of {self.page_size}, got {len(pages)}")
        if end == 0:
            return Match(0, self.root_node)
        if namespace not in self.root_node.children:
            root = self.root_node.children[namespace] = self._new(self.root_node, array("q"), 0, [])
            root.namespace = namespace
        node, cached = self._walk(tokens, namespace, None, split=True)
        if cached < end:
            node = self._add_leaf(node, tokens[cached:], list(pages[cached // self.page_size : self._ceil(end)]))
            node.priority = priority
        above = node
        while above.end > 0:
            above.priority = max(above.priority, priority)
            above.hits += above.end > inserted_len
            assert above.parent is not None
            above = above.parent
        self.queue.offer(node)
        return Match(cached, node)

    # ---------------------------------------------------------------- pin and shrink

    def lock(self, node: Node) -> None:
        """Pin the path to ``node``: its pages become PROTECTED (or stay PRIVATE) until the matching `unlock`.

        Counts nest; to move a lock, lock the new node first. Raises ValueError if the node was evicted.
        O(pages of the path that were unlocked + depth).
        """
        self._require_live(node)
        above: Node | None = node
        while above is not None:
            if above.lock == 0 and above.pages:
                self.store.lock(above.pages)
            above.lock += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this node. Raises ValueError, with nothing changed, if it is not locked."""
        if node.lock <= 0:
            raise ValueError(f"unlock of a node that is not locked: {node}")
        above: Node | None = node
        while above is not None:
            parent = above.parent
            above.lock -= 1
            if above.lock == 0:
                if above.pages:
                    self.store.unlock(above.pages)
                self._settle(above)
            above = parent

    def evict(self, num_pages: int) -> int:
        """Free ``num_pages`` pages, or as many as can be; return how many became FREE, which is never more.

        Takes pages from the ends of unlocked leaves, in the policy's order (`eviction`): of a leaf with a tail that
        page alone, of another no more than are asked for. A leaf without pages is gone, and its parent may join the
        order. A page that others hold too (a running request, the other half of a split) frees nothing: it goes all
        the same, in its turn. The walk stops when no page is EVICTABLE, as nothing left to drop would free one.
        O(removed pages) and O(log n) for each leaf, no scan.
        """
        store, before = self.store, self.store.free
        while (missing := num_pages - (store.free - before)) > 0 and store.evictable > 0:
            leaf = self.queue.pop()
            if leaf is None:
                raise RuntimeError(f"{store.evictable} evictable pages, but no evictable leaf refers to them")
            self._cut_leaf(leaf, 1 if self.queue.has_tail(leaf) else missing)
        return store.free - before

    def reset(self) -> None:
        """Drop all nodes and their page references; `root_node` stays. O(nodes + pages).

        Raises ValueError, with nothing changed, while anything is locked: its holder would unlock a node that is gone.
        """
        if self.root_node.lock:
            raise ValueError(f"reset of a prefix tree with {self.root_node.lock} locks held")
        self.queue.clear()
        for node in list(self.walk()):
            self.store.unref(node.pages, False)
            node.parent = None
            node.children = {}
        for root in (*self.root_node.children.values(), self.root_node):
            root.children = {}
        self.num_nodes = self.num_tokens = 0

    # ---------------------------------------------------------------- inspect

    def root(self, namespace: Hashable = None) -> Node:
        """The root of ``namespace``, or ``root_node`` where nothing is cached there. Creates nothing; safe to lock."""
        return self.root_node.children.get(namespace, self.root_node)

    def walk(self) -> Iterator[Node]:
        """All nodes that hold tokens, parents before children. Do not change the tree meanwhile."""
        stack = [*self.root_node.children.values()]
        while stack:
            node = stack.pop()
            if node.pages:
                yield node
            stack.extend(node.children.values())

    def pretty(self) -> str:
        """The tree as indented text, one node a line."""
        return pretty(self)

    def check_integrity(self) -> list[str]:
        """Every broken invariant as a sentence; empty if all hold. Mutates nothing. O(tree)."""
        return check_integrity(self)

    # ---------------------------------------------------------------- internals

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _require_live(self, node: Node) -> None:
        # A namespace root that was dropped keeps its parent: it pins no page, so a lock on it is harmless.
        if node.parent is None and node is not self.root_node:
            raise ValueError(f"the node was evicted: {node}")

    def _walk(self, tokens: Tokens, namespace: Hashable, limit: int | None, *, split: bool) -> tuple[Node, int]:
        """Follow ``tokens[:limit]``, stamping the path; (last node walked through, tokens matched)."""
        end = len(tokens)
        if limit is not None:
            if limit < 0:
                raise ValueError(f"limit must not be negative, is {limit}")
            end = min(end, limit)
        now = self._tick()
        node = self.root_node.children.get(namespace)
        if node is None:
            return self.root_node, 0
        pos = 0
        while pos < end:
            child = node.children.get(tokens[pos])
            if child is None:
                break
            child.used = now
            n = min(common_prefix(child.tokens, tokens, 0, pos), end - pos)
            pos += n
            if pos < child.end:
                return (self._split(child, n) if split else node), pos
            node = child
        return node, pos

    def _new(self, parent: Node, tokens: Tokens, start: int, pages: list[int]) -> Node:
        now = self._tick()
        return Node(parent, tokens, start, pages, used=now, serial=now)

    def _add_leaf(self, parent: Node, tokens: Tokens, pages: list[int]) -> Node:
        leaf = self._new(parent, tokens, parent.end, pages)
        self.store.ref(pages, False)
        parent.children[tokens[0]] = leaf
        parent.continued |= leaf.end > self._ceil(parent.end) * self.page_size
        self.num_nodes += 1
        self.num_tokens += len(tokens)
        return leaf

    def _split(self, low: Node, n: int) -> Node:
        """Put the first ``n`` tokens of ``low`` into a new parent, which is returned; ``low`` stays who it was."""
        cut = low.start + n
        first = low.start // self.page_size
        assert low.parent is not None
        up = self._new(low.parent, low.tokens[:n], low.start, low.pages[: self._ceil(cut) - first])
        up.used, up.lock, up.hits, up.priority = low.used, low.lock, low.hits, low.priority
        up.continued = True
        if cut % self.page_size:  # the seam page now has a second holder, and a second lock where the first is one
            self.store.ref(up.pages[-1:], low.lock > 0)
        low.parent.children[up.tokens[0]] = up
        low.pages = low.pages[cut // self.page_size - first :]
        low.parent, low.tokens, low.start = up, low.tokens[n:], cut
        up.children[low.tokens[0]] = low
        self.num_nodes += 1
        return up

    def _cut_leaf(self, leaf: Node, num_pages: int) -> None:
        """Give up the last ``num_pages`` pages of ``leaf``; it is gone if that leaves no token. O(``num_pages``)."""
        keep = max(0, len(leaf.pages) - num_pages)
        tokens = (leaf.start // self.page_size + keep) * self.page_size - leaf.start
        if tokens <= 0:
            self._remove_leaf(leaf)
            return
        given_up = leaf.pages[keep:]
        self.num_tokens -= len(leaf.tokens) - tokens
        del leaf.tokens[tokens:], leaf.pages[keep:]
        leaf.end = leaf.start + tokens
        self.store.unref(given_up, False)
        self.queue.offer(leaf)

    def _remove_leaf(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        leaf.parent = None
        self.store.unref(leaf.pages, False)
        self.num_nodes -= 1
        self.num_tokens -= len(leaf.tokens)
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """``node`` lost a child or its last lock: queue it if it is evictable, drop it if it is an empty namespace."""
        if node.pages:
            self.queue.offer(node)
        elif not node.children and node.lock == 0 and self.root_node.children.get(node.namespace) is node:
            # An empty namespace leaves no trace, so requests with ever new salts cannot grow the tree.
            del self.root_node.children[node.namespace]
