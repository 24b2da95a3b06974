# SPDX-License-Identifier: Apache-2.0
"""`check_integrity` finds what is broken on purpose: each corruption is planted in a sound tree."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from sglang_vattn.radix import Node, PrefixTree

from sglang_vattn._core import Pages
from tests.radix.page_model import PageModel, take


def sound(store: PageModel | Pages) -> tuple[PrefixTree, Node, Node, Node]:
    """A tree with a split in mid-page, a lock and a running request: (tree, upper, locked lower half, free leaf)."""
    tree = PrefixTree(store, 4)
    first, second = take(store, 3), take(store, 3)
    tree.insert(list(range(10)), first, "a")
    store.release(first)
    leaf = tree.insert([*range(6), 66, 67], [first[0], second[0]], "a", priority=1).node
    store.release(second[:2])
    lower = tree.match(list(range(10)), "a").node
    tree.lock(lower)
    upper = lower.parent
    assert upper is not None
    assert upper is leaf.parent
    assert not tree.check_integrity()
    return tree, upper, lower, leaf


Plant = Callable[[PrefixTree, Node, Node, Node], object]


def attr(of: str, name: str, value: object) -> Plant:
    """Set one attribute of the tree, or of one node."""

    def plant(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
        setattr({"tree": tree, "upper": upper, "lower": lower, "leaf": leaf}[of], name, value)

    return plant


def same_serial(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    leaf.serial = upper.serial


def rekey(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    upper.children[99] = upper.children.pop(66)


def orphan_queue_entry(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    del upper.children[66]


def forget_queue(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    tree.queue.clear()


def queue_too_late(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    tree.queue.clear()
    leaf.used += 5
    tree.queue.offer(leaf)
    leaf.used -= 5


def drop_seam_reference(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    tree.store.unref([lower.pages[0]], True)


def lose_page_lock(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    tree.store.unlock([lower.pages[-1]])


def empty_namespace(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    root = Node(tree.root_node, array("q"), 0, [], used=0, serial=0)
    root.namespace = "b"
    tree.root_node.children["b"] = root


def wrong_namespace(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    tree.root("a").namespace = "b"


def unlocked_root(tree: PrefixTree, upper: Node, lower: Node, leaf: Node) -> None:
    tree.root_node.lock = 0


@pytest.mark.parametrize("store", [PageModel, Pages])
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (attr("tree", "num_nodes", 2), "num_nodes"),
        (attr("tree", "num_tokens", 2), "num_tokens"),
        (attr("tree", "clock", 1), "after the clock"),
        (attr("leaf", "parent", None), "does not know it"),
        (attr("leaf", "start", 5), "not cut where"),
        (attr("leaf", "end", 9), "not cut where"),
        (attr("leaf", "pages", []), "num_nodes"),
        (attr("leaf", "pages", [4, 4]), "not as many pages"),
        (attr("lower", "pages", [2, 2]), "same page"),
        (attr("lower", "lock", 0), "counts"),
        (attr("lower", "lock", 2), "fewer locks"),
        (attr("leaf", "lock", -1), "negative lock"),
        (attr("upper", "priority", 0), "higher priority"),
        (same_serial, "same serial"),
        (attr("leaf", "queued", False), "queued is False"),
        (rekey, "not its first token"),
        (orphan_queue_entry, "not in the tree"),
        (forget_queue, "not in the eviction queue"),
        (queue_too_late, "behind its true place"),
        (drop_seam_reference, "references, locked"),
        (lose_page_lock, "references, locked"),
        (empty_namespace, "not dropped"),
        (wrong_namespace, "another key"),
        (unlocked_root, "root_node has 0 locks"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_planted_corruption_is_found(store: type[PageModel] | type[Pages], plant: Plant, found: str) -> None:
    tree, *nodes = sound(store(16))
    plant(tree, *nodes)
    problems = tree.check_integrity()
    assert any(found in problem for problem in problems), problems


def test_without_refs_the_counters_are_still_bounded() -> None:
    class Opaque(PageModel):
        refs = None  # type: ignore[assignment]

    store = Opaque(16)
    tree, _, _, leaf = sound(store)
    store.owned.clear()
    store.unref(leaf.pages, False)
    assert any("some of them are free" in problem for problem in tree.check_integrity())
