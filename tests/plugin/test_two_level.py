# SPDX-License-Identifier: Apache-2.0
"""Attention on the host: over a row, and in two levels, against the plain formula; the device side of groups."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vattn.attention.groups import GroupBuffers
from sglang_vattn.attention.kernels.sdpa import Partial, attend, attend_partial, merge
from sglang_vattn.reading import group_room
from sglang_vattn.request_pages import RequestPages
from sglang_vattn.sharing import Group, PathNode, SharedPaths

TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}  # fp32 rounding


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The formula, in fp64."""
    new, heads, _ = q.shape
    length, group = k.shape[0], heads // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    future = torch.arange(length)[None] > torch.arange(length - new, length)[:, None]
    return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(0, 1).float()


def strided(length: int, heads: int, dim: int, v_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as rows have them: views with the stride of a token of several layers."""
    token = torch.randn(length, 3, heads * (dim + v_dim))[:, 1]
    return token[:, : heads * dim].unflatten(1, (heads, dim)), token[:, heads * dim :].unflatten(1, (heads, v_dim))


@pytest.mark.parametrize(("q_heads", "heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize(("length", "new"), [(1, 1), (17, 1), (300, 1), (17, 17), (300, 299), (300, 33), (5, 2)])
def test_attention_over_a_row(q_heads: int, heads: int, length: int, new: int) -> None:
    torch.manual_seed(length + new)
    k, v = strided(length, heads, 32, 48)
    q = torch.randn(new, q_heads, 32)
    before = k.clone(), v.clone()
    torch.testing.assert_close(attend(q, k, v, 0.2), plain(q, k, v, 0.2), **TOLERANCE)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_two_levels_equal_one_level_over_random_trees_and_batches(seed: int) -> None:
    """Random prefix trees, groups as the plugin forms them, members that differ in everything after."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    page, heads, dim = rng.choice([4, 16]), 2, 16
    memory = torch.randn(200 * page, 2, heads, dim)  # home slots: (slots, K or V, heads, dim)
    fresh = iter(range(200))
    lists: list[list[int]] = []
    for _ in range(rng.randrange(2, 10)):
        start = rng.choice(lists)[: rng.randrange(6)] if lists else []
        lists.append(start + [next(fresh) for _ in range(rng.randrange(1, 6))])
    requests = [RequestPages(pages=pages) for pages in lists]
    lengths = [len(pages) * page - rng.randrange(page) for pages in lists]
    paths = SharedPaths()
    for request in requests:
        paths.join(request, len(request.pages) - 1)
    groups = paths.groups(requests, least_members=2, least_pages=1)

    q = torch.randn(len(requests), 2 * heads, dim)

    def keys(pages: list[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = [pages[i // page] * page + i % page for i in range(start, end)]
        return memory[slots, 0], memory[slots, 1]

    shared: dict[int, tuple[int, Partial]] = {}
    for group in groups:
        tokens = group.node.end * page
        out, lse = attend_partial(q[group.members], *keys(group.node.path(), 0, tokens), 0.25)
        shared |= {index: (tokens, Partial(out[i], lse[i])) for i, index in enumerate(group.members)}
    for index, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        expected = plain(q[index : index + 1], *keys(request.pages, 0, length), 0.25)[0]
        if index in shared:
            tokens, prefix = shared[index]
            own = attend_partial(q[index : index + 1], *keys(request.pages, tokens, length), 0.25)
            result = merge(prefix, Partial(own.out[0], own.lse[0]))
        else:
            result = attend(q[index : index + 1], *keys(request.pages, 0, length), 0.25)[0]
        torch.testing.assert_close(result, expected, atol=5e-6, rtol=5e-6)


@given(seed=st.integers(0, 10**6), batch=st.integers(8, 64))
@settings(max_examples=100, deadline=None)
def test_group_buffers_say_what_the_groups_say(seed: int, batch: int) -> None:
    rng = random.Random(seed)
    indices = list(range(rng.randrange(2, batch + 1)))  # the rest of the graph's batch is padding
    rng.shuffle(indices)
    groups = []
    for _ in range(rng.randrange(group_room(len(indices)) + 1)):
        members = [indices.pop() for _ in range(min(len(indices), rng.randrange(2, 6)))]
        if len(members) >= 2:
            node = PathNode(None, [], rng.randrange(1, 50))
            node.row = rng.randrange(1, 9)
            groups.append(Group(node, members))
    buffers = GroupBuffers(batch, 128, "cpu")
    buffers.update([Group(PathNode(None, [], 3), [0, 1])], 1)  # what was there before
    buffers.update(groups, 2)
    order = buffers.order.tolist()
    assert sorted(order) == list(range(batch))
    assert [order[at] for at in buffers.position.tolist()] == list(range(batch))
    bounds = buffers.bounds.tolist()
    grouped = set()
    for i, group in enumerate(groups):
        assert order[bounds[i] : bounds[i + 1]] == group.members
        assert buffers.prefix_tokens[i] == group.node.end * 128 and buffers.rows[i] == group.node.row
        assert all(buffers.shared_pages[index] == group.node.end for index in group.members)
        grouped |= set(group.members)
    assert set(bounds[len(groups) :]) == {len(grouped)} and not buffers.prefix_tokens[len(groups) :].any()
    assert all(buffers.shared_pages[index] == 0 for index in range(batch) if index not in grouped)


def test_buffers_change_only_with_the_version() -> None:
    buffers = GroupBuffers(8, 128, "cpu")
    node = PathNode(None, [], 2)
    buffers.update([Group(node, [0, 1])], 5)
    buffers.update([], 5)
    assert buffers.shared_pages[0] == 2
    buffers.update([], 6)
    assert not buffers.shared_pages.any()
