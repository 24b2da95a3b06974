# SPDX-License-Identifier: Apache-2.0
"""The device code around two-level decode, against plain torch."""

from __future__ import annotations

import pytest
import torch

from sglang_vattn.attention.two_level import merge, own_part, store_and_order


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "dim"), [(1, 32, 8, 128), (7, 28, 4, 128), (64, 16, 2, 64)])
def test_store_and_order(batch: int, heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(batch)
    # As a model gives them: views of one row of queries, keys and values a token.
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    slots = torch.randperm(500, device="cuda")[:batch]
    position = torch.randperm(batch, device="cuda").to(torch.int32)
    pool = torch.zeros(500, 3, 2, kv_heads, dim, device="cuda", dtype=torch.bfloat16)  # three layers a token
    expected = pool.clone()
    expected[slots, 1, 0], expected[slots, 1, 1] = k.unflatten(1, (kv_heads, dim)), v.unflatten(1, (kv_heads, dim))
    ordered = store_and_order(
        q.unflatten(1, (heads, dim)), k.unflatten(1, (kv_heads, dim)), v, slots, pool[:, 1, 0], pool[:, 1, 1], position
    )
    assert torch.equal(pool, expected)
    assert torch.equal(ordered[position.long()], q.unflatten(1, (heads, dim)))


def test_store_past_two_to_the_31_elements() -> None:
    pool = torch.empty((1 << 31) // 1024 + 200, 1, 1024, device="cuda", dtype=torch.bfloat16)
    pool[-100:] = 0
    q, k = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16), torch.randn(2, 1024, device="cuda").bfloat16()
    slots = torch.tensor([len(pool) - 1, len(pool) - 7], device="cuda")
    store_and_order(q, k, k, slots, pool, pool, torch.arange(2, dtype=torch.int32, device="cuda"))
    assert torch.equal(pool[slots, 0], k)
    assert pool[-100:].count_nonzero() == k.count_nonzero()


def test_merge() -> None:
    torch.manual_seed(0)
    batch, heads, dim = 9, 8, 128
    shared, own = (torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shared_lse, own_lse = (3 * torch.randn(heads, batch, device="cuda") for _ in range(2))
    position = torch.randperm(batch, device="cuda").to(torch.int32)
    pages = torch.tensor([3, 0, 1, 1, 0, 2, 5, 0, 1], dtype=torch.int32, device="cuda")
    shared[position[pages == 0].long()] = float("nan")  # in no group: must not be read
    weight = torch.sigmoid(shared_lse[:, position.long()] - own_lse).T[..., None]
    expected = shared[position.long()].float() * weight + own.float() * (1 - weight)
    expected[pages == 0] = own[pages == 0].float()
    out = merge(shared, shared_lse, own, own_lse, position, pages, torch.empty_like(own))
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)


def test_own_part() -> None:
    page, requests = 128, 5
    req_to_token = torch.zeros(8, 4096, dtype=torch.int32, device="cuda")
    slots, lens, shared = [3, 1, 7, 0, 2], [1, 700, 4096, 1, 129], [0, 5, 2, 0, 1]
    for slot in range(8):
        pages = 100 * slot + torch.arange(32, device="cuda")
        req_to_token[slot] = (pages[:, None] * page + torch.arange(page, device="cuda")).flatten().to(torch.int32)
    table = torch.full((requests, 40), -1, dtype=torch.int32, device="cuda")
    own = torch.zeros(requests, dtype=torch.int32, device="cuda")
    on_device = (torch.tensor(x, device="cuda") for x in (slots, lens))
    own_part(
        req_to_token, *on_device, torch.tensor(shared, dtype=torch.int32, device="cuda"), page,
        page_table=table, own_lens=own,
    )  # fmt: skip
    for i, (slot, length, skipped) in enumerate(zip(slots, lens, shared, strict=True)):
        assert own[i] == length - skipped * page
        last = -(-length // page)
        assert table[i, : last - skipped].tolist() == [100 * slot + p for p in range(skipped, last)]
        assert (table[i, last - skipped :] == -1).all()
