# SPDX-License-Identifier: Apache-2.0
"""The same leaves are evicted as by stock SGLang, for every policy: our tree is driven beside stock's three.

The classic RadixCache, and the default UnifiedRadixCache with its Python and its Rust core, get the same sequence of
insert, match, touch, lock, unlock and evict at page size 1, where pages and tokens are the same thing. After each step
the cached token strings must be equal, whatever the shapes of the trees. Stock drops leaves whole, so it often frees
more than it was asked for; ours frees that much on being asked again, and must have given up the same tokens then.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_vattn.radix import Node, PrefixTree

from tests.radix.page_model import PageModel, take

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

Prefix = tuple[Hashable, tuple[int, ...]]  # namespace, tokens from the start


class NoPool:
    """Stock's allocator interface, as far as a tree without a pool calls it."""

    device = torch.device("cpu")
    page_size = 1

    def free_segment(self, indices: Any, start_pos: int) -> None:
        pass


class Stock:
    """A stock tree. The slot stored for a token is the number of the prefix that it completes."""

    def __init__(self, kind: str, policy: str) -> None:
        self.name = kind
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=NoPool(),
            page_size=1,
            eviction_policy=policy,
        )
        if kind == "classic":
            self.tree = RadixCache(params)
        else:
            params.tree_components = (ComponentType.FULL,)
            params.tree_core_backend = kind
            self.tree = UnifiedRadixCache(params)
            assert type(self.tree.tree_core).__name__.lower().startswith("rust") == (kind == "rust")
        self.numbers: dict[Prefix, int] = {}

    def insert(self, tokens: list[int], namespace: str | None, priority: int, inserted_len: int) -> tuple[int, Any]:
        prefixes = [(namespace, tuple(tokens[: n + 1])) for n in range(len(tokens))]
        slots = torch.tensor([self.numbers.setdefault(prefix, len(self.numbers)) for prefix in prefixes])
        key = RadixKey(array("q", tokens), namespace)
        result = self.tree.insert(InsertParams(key=key, value=slots, priority=priority, inserted_len=inserted_len))
        return result.prefix_len, result.last_device_node

    def match(self, tokens: list[int], namespace: str | None, limit: int) -> tuple[int, Any]:
        key = RadixKey(array("q", tokens), namespace, limit=limit)
        result = self.tree.match_prefix(MatchPrefixParams(key=key))
        return result.device_prefix_len, result.last_device_node

    def touch(self, tokens: list[int], namespace: str | None, limit: int) -> None:
        self.tree.touch_prefix(RadixKey(array("q", tokens), namespace, limit=limit))

    def lock(self, node: Any) -> Any:
        return self.tree.lock(node)

    def unlock(self, lock: Any) -> None:
        self.tree.unlock(lock)

    def evict(self, n: int) -> int:
        return int(self.tree.evict(EvictParams(num_tokens=n)).num_tokens_evicted)

    def cached(self) -> set[Prefix]:
        if not self.tree.evictable_size() + self.tree.protected_size():
            return set()
        by_number = {number: prefix for prefix, number in self.numbers.items()}
        return {by_number[slot] for slot in self.tree.all_values_flatten().tolist()}

    def reset(self) -> None:
        self.tree.reset()
        self.numbers.clear()


class Ours:
    """Our tree in the same clothes; nobody owns a page after its insert."""

    name = "ours"

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.reset()

    def insert(self, tokens: list[int], namespace: str | None, priority: int, inserted_len: int) -> tuple[int, Any]:
        pages = take(self.store, len(tokens))
        result = self.tree.insert(array("q", tokens), pages, namespace, priority, inserted_len=inserted_len)
        self.store.release(pages)
        return result

    def match(self, tokens: list[int], namespace: str | None, limit: int) -> tuple[int, Any]:
        return self.tree.match(array("q", tokens), namespace, limit)

    def touch(self, tokens: list[int], namespace: str | None, limit: int) -> None:
        self.tree.touch(array("q", tokens), namespace, limit)

    def lock(self, node: Any) -> Any:
        self.tree.lock(node)
        return node

    def unlock(self, lock: Any) -> None:
        self.tree.unlock(lock)

    def evict(self, n: int) -> int:
        return self.tree.evict(n)

    def cached(self) -> set[Prefix]:
        out: set[Prefix] = set()
        stack: list[tuple[Node, Hashable, tuple[int, ...]]] = [
            (root, key, ()) for key, root in self.tree.root_node.children.items()
        ]
        while stack:
            node, namespace, path = stack.pop()
            tokens = (*path, *node.tokens)
            out.update((namespace, tokens[:n]) for n in range(node.start + 1, node.end + 1))
            stack.extend((child, namespace, tokens) for child in node.children.values())
        return out

    def reset(self) -> None:
        self.store = PageModel(320)
        self.tree = PrefixTree(self.store, 1, self.policy)


class Step(NamedTuple):
    verb: str
    tokens: list[int]
    namespace: str | None
    n: int  # what the verb makes of it
    priority: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(("insert",) * 4 + ("match",) * 3 + ("touch", "lock", "lock", "unlock", "evict", "evict")),
        st.lists(st.integers(0, 2), min_size=1, max_size=9),
        st.sampled_from((None, None, "x")),
        st.integers(0, 12),
        st.integers(-1, 2),
    ),
    min_size=8,
    max_size=40,
)

_trees: dict[str, list[Any]] = {}


def trees(policy: str) -> list[Any]:
    """Ours and the three of stock, empty."""
    if policy not in _trees:
        _trees[policy] = [Ours(policy), *(Stock(kind, policy) for kind in ("classic", "python", "rust"))]
    for tree in _trees[policy]:
        tree.reset()
    return _trees[policy]


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_same_strings_stay_cached(policy: str, steps: list[Step]) -> None:
    drive(trees(policy), steps)


def drive(trees: list[Any], steps: list[Step]) -> None:
    """Run ``steps`` on all trees; assert equal results and equal contents after each."""
    found: list[tuple[Step, int, list[Any]]] = []  # step, length, each tree's node
    locks: list[list[Any]] = []
    for step in steps:
        if step.verb == "insert":
            results = [tree.insert(step.tokens, step.namespace, step.priority, step.n // 2) for tree in trees]
            found = [(step, len(step.tokens), [node for _, node in results])]
        elif step.verb == "match":
            results = [tree.match(step.tokens, step.namespace, min(step.n + 1, len(step.tokens))) for tree in trees]
            assert len({length for length, _ in results}) == 1, [length for length, _ in results]
            found.append((step, results[0][0], [node for _, node in results]))
        elif step.verb == "touch" and found:
            # Where the path is cut already: stock's touch would cut it, ours never does (see the test below).
            earlier, length, _ = found[step.n % len(found)]
            if length:
                for tree in trees:
                    tree.touch(earlier.tokens, earlier.namespace, length)
        elif step.verb == "lock" and found:
            nodes = found[-1][2]
            locks.append([tree.lock(node) for tree, node in zip(trees, nodes, strict=True)])
        elif step.verb == "unlock" and locks:
            for tree, lock in zip(trees, locks.pop(step.n % len(locks)), strict=True):
                tree.unlock(lock)
        elif step.verb == "evict":
            ours, *stock = trees
            freed = [tree.evict(step.n) for tree in stock]
            assert len(set(freed)) == 1, freed
            first = ours.evict(step.n)
            assert first == min(step.n, freed[0]), "no more than asked for, and all that there is"
            assert ours.evict(freed[0] - first) == freed[0] - first
            found = []  # the nodes may be gone
        contents = [tree.cached() for tree in trees]
        for tree, cached in zip(trees, contents, strict=True):
            assert cached == contents[0], (tree.name, step)
        assert not trees[0].tree.check_integrity()
    for lock in locks:
        for tree, held in zip(trees, lock, strict=True):
            tree.unlock(held)
