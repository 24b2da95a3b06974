# SPDX-License-Identifier: Apache-2.0
"""The same K and V twice: in stock's layout, and in an address space of ours, with the same slot numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_vattn import _core
from sglang_vattn.geometry import CUDA_GRANULE, READ_AHEAD_TOKENS, page_geometry

HEADS, KV_HEADS, DIM, LAYERS, PAGE = 32, 8, 128, 8, 128
WAIT_S = 60.0


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Memory:
    """Stock's ``k[layer]`` and ``v[layer]`` of shape (slots, heads, dim); our ``rows[layer]``, K and V.

    Requests take their pages from ``order``, which is random, as after a long run.
    """

    def __init__(self, pages: int = 5000, num_rows: int = 260, row_tokens: int = 131072) -> None:
        self.geometry = page_geometry(
            layers=LAYERS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, itemsize=2, granule_bytes=CUDA_GRANULE,
            page_size=PAGE,
        )  # fmt: skip
        self.read_ahead = READ_AHEAD_TOKENS["cuda"]
        self.pages_per_row = -(-(row_tokens + self.read_ahead) // PAGE)
        stripes, driver = self.geometry.stripes, _core.CudaDriver(0)
        self.space = _core.AddressSpace(
            _core.StripedDriver(driver, stripes), pages, self.geometry.stripe_bytes, num_rows, self.pages_per_row
        )
        # All of them, for good: SDPA takes a batch of rows that lie beside each other as one view.
        self.own_rows = [self.space.acquire_row() for _ in range(num_rows - 1)]
        self.tokens = (pages + 1) * PAGE  # with the padding page
        self.order = list(range(1, pages + 1))
        random.Random(0).shuffle(self.order)
        element = self.geometry.token_stride // 2
        width, in_stripe = KV_HEADS * DIM, LAYERS // stripes
        home = torch.from_dlpack(self.space.home()).view(torch.bfloat16)
        flat = torch.from_dlpack(self.space.rows()).view(torch.bfloat16)
        row_tokens = self.pages_per_row * PAGE

        def views(layer: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
            offset, stripe = (2 * (layer % in_stripe) + part) * width, layer // in_stripe
            rows = (num_rows, row_tokens, KV_HEADS, DIM), (row_tokens * element, element, DIM, 1)
            return (
                home.as_strided(
                    (self.tokens, KV_HEADS, DIM), (element, DIM, 1), offset + stripe * (len(home) // stripes)
                ),
                flat.as_strided(*rows, offset + stripe * (len(flat) // stripes)),
            )

        self.k, self.v = ([self._random() for _ in range(LAYERS)] for _ in range(2))
        self.home, self.rows = [], []
        for layer in range(LAYERS):
            (k_home, k_rows), (v_home, v_rows) = views(layer, 0), views(layer, 1)
            k_home.copy_(self.k[layer])
            v_home.copy_(self.v[layer])
            self.home.append((k_home, v_home))
            self.rows.append((k_rows, v_rows))

    def _random(self) -> torch.Tensor:
        return torch.randn(self.tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def paged(self, layer: int, page: int, *, home: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as (pages, page, heads, dim); every page size here divides 128."""
        k, v = self.home[layer] if home else (self.k[layer], self.v[layer])
        return k.unflatten(0, (-1, page)), v.unflatten(0, (-1, page))

    def pages_of(self, request: int, length: int) -> list[int]:
        """Pages of a request that shares nothing, those behind its end included."""
        count = -(-(length + self.read_ahead) // PAGE)
        own = [self.order[(request * count + i) % len(self.order)] for i in range(count)]
        return own

    def slots(self, batch: int, length: int) -> torch.Tensor:
        """Slot of each token of each request, int32 (batch, length)."""
        return torch.stack([self.slots_of(self.pages_of(request, length), length) for request in range(batch)])

    def slots_of(self, pages: Sequence[int], length: int) -> torch.Tensor:
        starts = torch.tensor(pages, device="cuda", dtype=torch.int32)[:, None] * PAGE
        return (starts + torch.arange(PAGE, device="cuda", dtype=torch.int32)).reshape(-1)[:length]

    def table(self, slots: torch.Tensor, page: int) -> torch.Tensor:
        """Page table for pages of so many tokens, int32 (batch, pages)."""
        return (slots[:, ::page] // page).contiguous()

    @contextmanager
    def mapped(self, batch: int, length: int) -> Iterator[list[int]]:
        """Rows with the pages of the first ``batch`` requests."""
        with self.backed([self.pages_of(request, length) for request in range(batch)]) as rows:
            yield rows

    @contextmanager
    def backed(self, pages: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """A row for each list of pages, in order and beside each other, until the end of the block."""
        rows = self.own_rows[: len(pages)]
        assert len(rows) == len(pages), "a row short"
        for row, own in zip(rows, pages, strict=True):
            self.space.map(row, 0, own)
        for row, own in zip(rows, pages, strict=True):
            if not self.space.wait(row, len(own), WAIT_S):
                raise RuntimeError(self.space.error(row) or "rows were not mapped in a minute")
        try:
            yield rows
        finally:
            torch.cuda.synchronize()
            for row in rows:
                self.space.truncate(row, 0)
            self.space.drain(WAIT_S)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.home, self.rows = [], []
        self.space.close()
