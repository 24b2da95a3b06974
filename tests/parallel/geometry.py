# SPDX-License-Identifier: Apache-2.0
"""A rank's share of public models' KV caches, worked out by hand, and a small pool of each, written and read."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch

from sglang_vattn import pool as pools
from sglang_vattn.geometry import CUDA_GRANULE, PageGeometry, page_geometry

BUDGET = 60 << 30  # bytes for KV on each rank
PAGES = 6  # of the pools that are really built
DIM = 128

# layers, query heads, KV heads; head dim 128, bf16
MODELS = {
    "Llama-3.1-8B": (32, 32, 8),
    "Llama-3.1-70B": (80, 64, 8),
    "Qwen2.5-32B": (64, 40, 8),
    "Qwen2.5-7B": (28, 28, 4),  # fewer KV heads than 8 ranks: each is held by two of them
}


class Rank(NamedTuple):
    """What one rank of `ranks` has."""

    model: str
    ranks: int
    heads: int  # KV heads
    token_bytes: int
    page_size: int  # tokens
    page_bytes: int
    tokens: int  # in BUDGET


KIB, MIB = 1 << 10, 1 << 20
# 60 GiB = 61,440 MiB. Pages are the smallest of at least 128 tokens that fill whole 2 MiB.
RANKS = (
    Rank("Llama-3.1-8B", 2, 4, 64 * KIB, 128, 8 * MIB, 7680 * 128),
    Rank("Llama-3.1-8B", 4, 2, 32 * KIB, 128, 4 * MIB, 15360 * 128),
    Rank("Llama-3.1-8B", 8, 1, 16 * KIB, 128, 2 * MIB, 30720 * 128),
    Rank("Llama-3.1-70B", 2, 4, 160 * KIB, 128, 20 * MIB, 3072 * 128),
    Rank("Llama-3.1-70B", 4, 2, 80 * KIB, 128, 10 * MIB, 6144 * 128),
    Rank("Llama-3.1-70B", 8, 1, 40 * KIB, 256, 10 * MIB, 6144 * 256),
    Rank("Qwen2.5-32B", 2, 4, 128 * KIB, 128, 16 * MIB, 3840 * 128),
    Rank("Qwen2.5-32B", 4, 2, 64 * KIB, 128, 8 * MIB, 7680 * 128),
    Rank("Qwen2.5-32B", 8, 1, 32 * KIB, 128, 4 * MIB, 15360 * 128),
    Rank("Qwen2.5-7B", 2, 2, 28 * KIB, 512, 14 * MIB, 4388 * 512),
    Rank("Qwen2.5-7B", 4, 1, 14 * KIB, 1024, 14 * MIB, 4388 * 1024),
    Rank("Qwen2.5-7B", 8, 1, 14 * KIB, 1024, 14 * MIB, 4388 * 1024),
)


def geometry(rank: Rank) -> PageGeometry:
    layers = MODELS[rank.model][0]
    return page_geometry(
        layers=layers, kv_heads=rank.heads, k_dim=DIM, v_dim=DIM, itemsize=2, granule_bytes=CUDA_GRANULE
    )


def small_pool(rank: Rank, device: str) -> Any:
    """A pool of this rank's geometry with `PAGES` pages and three rows of up to four pages."""
    layers = MODELS[rank.model][0]
    pools.VattnPool.row_plan = pools.RowPlan(2, 3 * rank.page_size, 3)
    with mock.patch.dict("os.environ", VATTN_HOST_GRANULE=str(CUDA_GRANULE)):
        return pools.VattnPool(
            PAGES * rank.page_size, rank.page_size, torch.bfloat16, rank.heads, DIM, layers, device, False
        )


def check_pool(rank: Rank, pool: Any) -> None:
    """What is written by home slot, page by page and layer by layer, is read in the rows that hold the pages."""
    layers, size = MODELS[rank.model][0], rank.page_size
    assert len(pool.k_buffer) == len(pool.v_rows) == layers
    assert pool.k_buffer[0].shape == ((PAGES + 1) * size, rank.heads, DIM)
    assert pool.space.physical_bytes == (PAGES + 2) * rank.page_bytes
    rows = {pool.space.acquire_row(): [2, 5, 1], pool.space.acquire_row(): [2, 6]}  # page 2 is shared
    for row, pages in rows.items():
        pool.space.map(row, 0, pages)
        assert pool.space.wait(row, len(pages), 10)

    def content(layer: int, page: int, sign: int) -> torch.Tensor:
        """(tokens, heads, dim), exact in bf16; differs between neighbouring layers, pages, tokens and heads."""
        token = torch.arange(size, device=pool.device)[:, None, None]
        head = torch.arange(rank.heads, device=pool.device)[None, :, None]
        number = (31 * layer + 7 * page + 3 * token + 101 * head) % 251 + 1
        return (sign * number).to(torch.bfloat16).expand(size, rank.heads, DIM)

    for layer in range(layers):
        for page in range(1, PAGES + 1):
            slots = torch.arange(page * size, (page + 1) * size, device=pool.device)
            pool.k_buffer[layer][slots] = content(layer, page, 1)
            pool.v_buffer[layer][slots] = content(layer, page, -1)
    for layer in range(layers):
        for row, pages in rows.items():
            for index, page in enumerate(pages):
                span = slice(index * size, (index + 1) * size)
                assert torch.equal(pool.k_rows[layer][row, span], content(layer, page, 1)), (layer, row, page)
                assert torch.equal(pool.v_rows[layer][row, span], content(layer, page, -1)), (layer, row, page)
    assert pool.space.check_integrity() == []
