# SPDX-License-Identifier: Apache-2.0
"""Groups of a decode batch against brute force, over random trees of page lists."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vattn.request_pages import RequestPages
from sglang_vattn.sharing import SharedPaths


def common(lists: list[list[int]]) -> int:
    """Pages that all the lists begin with."""
    return next((i for i, pages in enumerate(zip(*lists, strict=False)) if len(set(pages)) > 1), min(map(len, lists)))


def best_saving(lists: list[list[int]], least_members: int, least_pages: int) -> int:
    """The most pages that any set of disjoint groups saves, a group being requests that share a prefix.

    A group may as well hold all requests that begin with its prefix, so prefixes stand for groups; nested ones
    exclude each other.
    """
    prefixes = {tuple(pages[:n]) for pages in lists for n in range(1, len(pages) + 1)}
    worth = {}
    for prefix in prefixes:
        members = sum(tuple(pages[: len(prefix)]) == prefix for pages in lists)
        saved = (members - 1) * len(prefix)
        if members >= least_members and saved >= least_pages:
            worth[prefix] = saved

    def best(under: tuple[int, ...]) -> int:
        deeper = {p[: len(under) + 1] for p in prefixes if len(p) > len(under) and p[: len(under)] == under}
        return max(worth.get(under, 0), sum(best(p) for p in deeper))

    return best(())


def random_requests(rng: random.Random, count: int) -> list[RequestPages]:
    """Page lists that branch from each other; pages past a branch belong to one request alone."""
    fresh = itertools.count(1)
    lists: list[list[int]] = []
    for _ in range(count):
        source = rng.choice(lists)[: rng.randrange(0, 6)] if lists and rng.random() < 0.8 else []
        lists.append(source + [next(fresh) for _ in range(rng.randrange(0, 4))])
    return [RequestPages(pages=pages) for pages in lists]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 9), members=st.integers(2, 3), pages=st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_groups_save_as_much_as_any_choice_could(seed: int, count: int, members: int, pages: int) -> None:
    requests = random_requests(random.Random(seed), count)
    paths = SharedPaths()
    for request in requests:
        paths.join(request, len(request.pages))
    groups = paths.groups(requests, least_members=members, least_pages=pages)
    lists = [request.pages for request in requests]
    taken = [index for group in groups for index in group.members]
    assert len(taken) == len(set(taken)), "a request is in two groups"
    for group in groups:
        prefix = group.node.path()
        assert len(prefix) == group.node.end
        assert all(lists[index][: group.node.end] == prefix for index in group.members)
        assert len(group.members) >= members and group.saved_pages >= pages
    assert sum(group.saved_pages for group in groups) == best_saving(lists, members, pages)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_the_tree_follows_requests_that_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    paths, running = SharedPaths(), []
    rows = itertools.count(1)
    given_rows: set[int] = set()
    for request in random_requests(rng, 30):
        version = paths.version
        paths.join(request, len(request.pages))
        paths.join(request, len(request.pages))  # again: no-op
        assert paths.version == version + 1
        running.append(request)
        for node in paths.nodes():
            if node.parent is not None and node.row == 0 and rng.random() < 0.3:
                node.row = next(rows)
                given_rows.add(node.row)
        while running and rng.random() < 0.45:
            paths.leave(running.pop(rng.randrange(len(running))))
        alive = list(paths.nodes())
        for request in running:
            assert request in paths
        for node in alive:
            below = [request for request in running if request.pages[: node.end] == node.path()]
            assert below or node is paths.root, "a node that nobody passes"
            assert all(child.pages[0] == key and child.parent is node for key, child in node.children.items())
            assert node is paths.root or common([request.pages for request in below]) >= node.end
        held = {node.row for node in alive if node.row}
        assert held | set(paths.vanished) == given_rows and not held & set(paths.vanished), "a row was lost"
    for request in running:
        paths.leave(request)
    assert not paths.root.children and set(paths.vanished) == given_rows


@pytest.mark.parametrize("strangers", [0, 40])
def test_only_requests_of_the_batch_count(strangers: int) -> None:
    """Requests that have joined and are not in this batch neither make a group nor stand in its members."""
    paths = SharedPaths()
    prefix = [1, 2, 3, 4]
    batch = [RequestPages(pages=[*prefix, 100 + i]) for i in range(3)]
    others = [RequestPages(pages=[*prefix, 200 + i]) for i in range(strangers)]
    for request in [*others, *batch]:
        paths.join(request, len(request.pages))
    (group,) = paths.groups(batch, least_members=2, least_pages=1)
    assert group.members == [0, 1, 2] and group.saved_pages == 8
