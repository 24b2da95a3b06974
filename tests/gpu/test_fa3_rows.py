# SPDX-License-Identifier: Apache-2.0
"""FA3 on rows against an fp32 reference, past the corners of tiles and pages; poison beyond each row's end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

from sglang_vattn import _core
from sglang_vattn.geometry import READ_AHEAD_TOKENS, page_geometry

HEADS, KV_HEADS, DIM, LAYERS, PAGE = 32, 8, 128, 4, 128


@pytest.fixture(scope="module")
def rows() -> Iterator[Any]:
    geometry = page_geometry(
        layers=LAYERS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, itemsize=2, granule_bytes=2 << 20, page_size=PAGE
    )
    space = _core.AddressSpace(_core.CudaDriver(0), 400, geometry.page_bytes, 64, 64)
    element = geometry.token_bytes // 2
    flat = torch.from_dlpack(space.rows()).view(torch.bfloat16)
    stride = (64 * PAGE * element, element, DIM, 1)
    views = [
        (
            flat.as_strided((64, 64 * PAGE, KV_HEADS, DIM), stride, (2 * layer) * KV_HEADS * DIM),
            flat.as_strided((64, 64 * PAGE, KV_HEADS, DIM), stride, (2 * layer + 1) * KV_HEADS * DIM),
        )
        for layer in range(LAYERS)
    ]
    yield space, views
    space.close()


def back(space: _core.AddressSpace, lengths: list[int]) -> list[int]:
    """A row for each length, backed as the plugin backs it, its pages zero."""
    home = torch.from_dlpack(space.home())
    home.zero_()
    used, out = 1, []
    for length in lengths:
        pages = -(-(length + READ_AHEAD_TOKENS["cuda"]) // PAGE)
        row = space.acquire_row()
        space.map(row, 0, list(range(used, used + pages)))
        assert space.wait(row, pages, 30), space.error(row)
        used += pages
        out.append(row)
    return out


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    new, length = q.shape[0], k.shape[0]
    k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(DIM)
    mask = torch.arange(length, device="cuda")[None] > torch.arange(length - new, length, device="cuda")[:, None]
    return (scores.masked_fill(mask, -math.inf).softmax(-1) @ v).transpose(0, 1)


NEW_TOKENS = {"decode": lambda n: 1, "prefill": lambda n: n, "extend": lambda n: (n + 1) // 2}


@pytest.mark.parametrize("kind", NEW_TOKENS)
def test_rows_give_the_right_attention_and_read_no_further_than_they_are_backed(rows: Any, kind: str) -> None:
    space, views = rows
    lengths = [1, 127, 128, 129, 176, 177, 255, 256, 257, 352, 353, 511, 513, 1000]
    index = back(space, lengths)
    queries = [NEW_TOKENS[kind](length) for length in lengths]
    for layer, (k_rows, v_rows) in enumerate(views):
        torch.manual_seed(layer)
        q = torch.randn(sum(queries), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        for row, length in zip(index, lengths, strict=True):
            k_rows[row, :length].normal_()
            v_rows[row, :length].normal_()
        out = flash_attn_with_kvcache(
            q=q, k_cache=k_rows, v_cache=v_rows,
            cache_batch_idx=torch.tensor(index, dtype=torch.int32, device="cuda"),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            cu_seqlens_q=torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device="cuda"),
            max_seqlen_q=max(queries), softmax_scale=DIM**-0.5, causal=True, ver=3,
        )  # fmt: skip
        torch.cuda.synchronize()
        start = 0
        for row, length, count in zip(index, lengths, queries, strict=True):
            expected = reference(q[start : start + count], k_rows[row, :length], v_rows[row, :length])
            torch.testing.assert_close(out[start : start + count].float(), expected, atol=2e-2, rtol=2e-2)
            start += count
    for row in index:
        space.retire_row(row)
    space.clean()
    assert space.drain(30)
