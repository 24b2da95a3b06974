# SPDX-License-Identifier: Apache-2.0
"""The corner cases that every kernel over rows passes, against a float32 reference, on the host and on the GPU.

Rows are real ones: ranges of addresses with pages in random order, some shared by alias. What lies past a row's end is
finite, and loud enough to drown the result if a kernel counts it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from sglang_vattn import _core
from sglang_vattn.attention.kernels import RowBatch, RowKernel
from sglang_vattn.geometry import CUDA_GRANULE, HOST_GRANULE, READ_AHEAD_TOKENS, page_geometry

LAYERS, LONGEST = 2, 1100
# Around the borders of pages, and of the kernels' tiles of 64, 80, 128, 144, 160, 176, 192 and 224 keys.
LENGTHS = [1, 2, 63, 64, 65, 80, 81, 127, 128, 129, 144, 145, 160, 161, 176, 177, 192, 193, 224, 225, 255, 256, 257,
           352, 353, 447, 448, 449, 511, 512, 513, 1000]  # fmt: skip
SHARED = 600  # two requests of this length and one more share all full pages but their last
LOUD = 8.0  # how much louder a row's first and last value are, so that a kernel that misses one is told
# Largest relative error of a token's output, and absolute error of its log-sum-exp. fp8 weights have three bits.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float8_e4m3fn: (8e-2, 2e-2),
    torch.float8_e5m2: (8e-2, 2e-2),
}


class Shape(NamedTuple):
    """Heads and dimensions as a model has them."""

    q_heads: int
    kv_heads: int
    dim: int


LLAMA, QWEN, GEMMA, PHI = Shape(32, 8, 128), Shape(14, 2, 64), Shape(8, 1, 256), Shape(8, 8, 96)
#: How many of a row's last tokens ask.
NEW_TOKENS: dict[str, Callable[[int], int]] = {
    "decode": lambda length: 1,
    "prefill": lambda length: length,
    "extend": lambda length: (length + 1) // 2,
    "mixed": lambda length: min(length, 1 + length * 7 % 150),
}


class Rows:
    """An address space whose rows hold random keys and values of ``dtype``."""

    def __init__(self, device: str, shape: Shape, dtype: torch.dtype) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype
        granule = CUDA_GRANULE if device == "cuda" else HOST_GRANULE
        geometry = page_geometry(
            layers=LAYERS, kv_heads=shape.kv_heads, k_dim=shape.dim, v_dim=shape.dim, itemsize=dtype.itemsize,
            granule_bytes=granule, stripes=1,
        )  # fmt: skip
        self.page = geometry.page_size
        self.ahead = READ_AHEAD_TOKENS["cuda"]  # on the host, too: a kernel may read that far
        self.pages_per_row = -(-(LONGEST + self.ahead) // self.page)
        self.lengths = [*LENGTHS, SHARED, SHARED, SHARED + 1]
        pages = sum(map(self._pages, self.lengths))
        driver = _core.CudaDriver(0) if device == "cuda" else _core.HostDriver(granule)
        self.space = _core.AddressSpace(driver, pages, geometry.page_bytes, len(self.lengths) + 9, self.pages_per_row)
        element = geometry.token_bytes // dtype.itemsize
        flat = torch.from_dlpack(self.space.rows()).view(dtype)
        row_tokens, width = self.pages_per_row * self.page, shape.kv_heads * shape.dim

        def view(part: int) -> torch.Tensor:
            size = (self.space.num_rows, row_tokens, shape.kv_heads, shape.dim)
            return flat.as_strided(size, (row_tokens * element, element, shape.dim, 1), part * width)

        self.layers = [(view(2 * layer), view(2 * layer + 1)) for layer in range(LAYERS)]
        self.index = self._map(random.Random(0).sample(range(1, pages + 1), pages))
        self._fill(torch.Generator().manual_seed(0))

    def _pages(self, length: int) -> int:
        return -(-(length + self.ahead) // self.page)

    def _map(self, free: list[int]) -> list[int]:
        """A row for each length, not in the order of the lengths; the last three share their leading pages."""
        rows = [self.space.acquire_row() for _ in range(len(self.lengths) + 5)]
        random.Random(1).shuffle(rows)
        shared: list[int] = []
        for row, length in zip(rows, self.lengths, strict=False):
            pages = [free.pop() for _ in range(self._pages(length))]
            if length in (SHARED, SHARED + 1):
                shared = shared or pages
                pages[: SHARED // self.page] = shared[: SHARED // self.page]
            self.space.map(row, 0, pages)
            assert self.space.wait(row, len(pages), 30), self.space.error(row)
        return rows[: len(self.lengths)]

    def _fill(self, generator: torch.Generator) -> None:
        loudest = min(torch.finfo(self.dtype).max / 2, 3e4)
        for k_rows, v_rows in self.layers:
            for row, length in zip(self.index, self.lengths, strict=True):
                backed = self._pages(length) * self.page
                for rows in (k_rows, v_rows):
                    value = torch.full((backed, *rows.shape[2:]), loudest)
                    value[:length] = torch.randn((length, *rows.shape[2:]), generator=generator)
                    if rows is v_rows:
                        value[0] *= LOUD
                        value[length - 1] *= LOUD
                    rows[row, :backed].copy_(value.to(self.dtype))

    def batch(self, chosen: list[int], new: Callable[[int], int]) -> RowBatch:
        """The requests of these numbers, in this order."""
        lengths = [self.lengths[i] for i in chosen]
        counts = [new(length) for length in lengths]
        bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
        index = torch.tensor([self.index[i] for i in chosen], dtype=torch.int32)
        on = self.device
        return RowBatch(
            index.to(on), torch.tensor(lengths, dtype=torch.int32).to(on), bounds.to(on), max(counts), max(lengths)
        )


@contextmanager
def open_rows(device: str, shape: Shape, dtype: torch.dtype) -> Iterator[Rows]:
    rows = Rows(device, shape, dtype)
    try:
        yield rows
    finally:
        if device == "cuda":
            torch.cuda.synchronize()
        rows.layers = []
        rows.space.close()


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float32: (new, q_heads, dim) and (new, q_heads)."""
    new, length = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length, device=q.device)
    scores.masked_fill_(position[None] > position[length - new :, None], float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def batches(rows: Rows) -> list[list[int]]:
    """All requests at once, and the shared ones; one alone; two alike."""
    everyone = list(range(len(rows.lengths)))
    return [everyone, everyone[-3:][::-1], [LENGTHS.index(257)], [LENGTHS.index(128), LENGTHS.index(128)]]


def check(kernel: RowKernel, rows: Rows, kind: str, *, softcap: float = 0.0) -> None:
    """All batches, all layers.

    Raises
    ------
    AssertionError
        Naming the request and the token that is furthest off.
    """
    shape = rows.shape
    q_dtype = torch.bfloat16 if rows.dtype.itemsize == 1 else rows.dtype
    scale = shape.dim**-0.5
    out_limit, lse_limit = TOLERANCE[rows.dtype]
    torch.manual_seed(2)
    for chosen in batches(rows):
        batch = rows.batch(chosen, NEW_TOKENS[kind])
        kernel.plan(batch)
        q = torch.randn(int(batch.q_bounds[-1]), shape.q_heads, shape.dim).to(rows.device, q_dtype)
        for k_rows, v_rows in rows.layers:
            out, lse = kernel(q, k_rows, v_rows, batch, scale=scale, softcap=softcap, need_lse=True)
            assert out.shape == q.shape and lse is not None and lse.shape == q.shape[:2]
            asked = q.to(rows.dtype) if kernel.name == "fa3" else q  # FA3 wants fp8 queries for fp8 keys
            for start, end, row, length in batch.spans:
                right, right_lse = reference(
                    asked[start:end], k_rows[row, :length], v_rows[row, :length], scale, softcap
                )
                off = (out[start:end].float() - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
                lse_off = (lse[start:end].float() - right_lse).abs().amax(dim=1)
                where = f"{kernel.name} {kind} {shape} {rows.dtype}: length {length}, {end - start} new, token"
                assert float(off.max()) <= out_limit, f"{where} {int(off.argmax())}: off by {float(off.max()):.2g}"
                assert float(lse_off.max()) <= lse_limit, (
                    f"{where} {int(lse_off.argmax())}: log-sum-exp off by {float(lse_off.max()):.2g}"
                )
