# SPDX-License-Identifier: Apache-2.0
"""Looking at a prefix tree from outside: as text, and as a list of broken invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tree import PrefixTree


def pretty(tree: PrefixTree) -> str:
    """The tree as indented text, one node a line, children below their parent."""
    lines = [f"{tree.num_nodes} nodes, {tree.num_tokens} tokens, page_size {tree.page_size}, {tree.policy}"]
    stack = [(f"namespace {key!r}: ", root, 1) for key, root in tree.root_node.children.items()]
    while stack:
        label, node, depth = stack.pop()
        lines.append(f"{'  ' * depth}{label}{node}")
        stack.extend(("", child, depth + 1) for child in node.children.values())
    return "\n".join(lines)


def check_integrity(tree: PrefixTree) -> list[str]:
    """Recompute everything that `tree` keeps incrementally; one sentence for each difference. Mutates nothing.

    What no tree can check is the content of a page: the tests do, with slots that hold a hash of their prefix.
    """
    return [*_shape(tree), *_nodes(tree), *_queue(tree), *_pages(tree)]


def _shape(tree: PrefixTree) -> Iterator[str]:
    top = tree.root_node
    if top.parent is not None or top.tokens or top.pages:
        yield f"root_node has a parent, tokens or pages: {top}"
    if top.lock < sum(root.lock for root in top.children.values()):
        yield f"root_node has {top.lock} locks, fewer than the namespaces below it"
    for key, root in top.children.items():
        if root.parent is not top or root.namespace != key or root.end or root.pages:
            yield f"namespace {key!r}: its root has another parent, another key, tokens or pages: {root}"
        if not root.children and not root.lock:
            yield f"namespace {key!r} is empty, but was not dropped"
    nodes = list(tree.walk())
    if len(nodes) != tree.num_nodes:
        yield f"num_nodes is {tree.num_nodes}, the tree has {len(nodes)}"
    if (tokens := sum(len(node.tokens) for node in nodes)) != tree.num_tokens:
        yield f"num_tokens is {tree.num_tokens}, the tree has {tokens}"
    if len({node.serial for node in nodes}) != len(nodes):
        yield "two nodes have the same serial: ties are not deterministic"


def _nodes(tree: PrefixTree) -> Iterator[str]:
    size = tree.page_size
    for parent in [*tree.root_node.children.values(), *tree.walk()]:
        if parent.lock < sum(child.lock for child in parent.children.values()):
            yield f"fewer locks than its children together: {parent}"
        for key, node in parent.children.items():
            if node.parent is not parent:
                yield f"its parent does not know it as a child: {node}"
            if not node.tokens or node.tokens[0] != key:
                yield f"under key {key!r} of its parent, which is not its first token: {node}"
            if node.start != parent.end or node.end != node.start + len(node.tokens):
                yield f"not cut where its parent ends, at {parent.end}, or not as long as its tokens: {node}"
            if len(node.pages) != -(-node.end // size) - node.start // size:
                yield f"not as many pages as [start, end) touches: {node}"
            if len(set(node.pages)) != len(node.pages):
                yield f"the same page at two page indices: {node}"
            if node.lock < 0:
                yield f"negative lock: {node}"
            if parent.pages and node.priority > parent.priority:
                yield f"a higher priority than its parent: {node}"
            if max(node.used, node.serial) > tree.clock:
                yield f"used or made after the clock's time {tree.clock}: {node}"


def _queue(tree: PrefixTree) -> Iterator[str]:
    nodes = set(tree.walk())
    entries = Counter(node for _, node in tree.queue)
    for node in nodes:
        if node.is_evictable and node not in entries:
            yield f"evictable, but not in the eviction queue: {node}"
        if node.queued != (entries[node] == 1):
            yield f"{entries[node]} entries in the eviction queue, but queued is {node.queued}: {node}"
    for place, node in tree.queue:
        if node not in nodes:
            yield f"in the eviction queue, but not in the tree: {node}"
        elif place > tree.queue.place(node):
            yield f"queued behind its true place: {node}"


def _pages(tree: PrefixTree) -> Iterator[str]:
    refs: Counter[int] = Counter()
    locked: Counter[int] = Counter()
    for node in tree.walk():
        refs.update(node.pages)
        if node.lock:
            locked.update(node.pages)
    store = tree.store
    read: Callable[[int], tuple[bool, int, int]] | None = getattr(store, "refs", None)
    if read is None:
        if store.evictable + store.protected + store.private < len(refs):
            yield f"the tree refers to {len(refs)} pages, and some of them are free"
        return
    owned = set()
    for page in refs:
        is_owned, *have = read(page)
        if is_owned:
            owned.add(page)  # PRIVATE, whatever the tree holds
        if have != (want := [refs[page], locked[page]]):
            yield f"page {page} counts {have} (references, locked), the tree has {want}"
    evictable, protected = len(refs.keys() - locked.keys() - owned), len(locked.keys() - owned)
    if (store.evictable, store.protected) != (evictable, protected):
        yield (
            f"the store counts {store.evictable} evictable and {store.protected} protected pages, "
            f"the tree has {evictable} and {protected}"
        )
