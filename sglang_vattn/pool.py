# SPDX-License-Identifier: Apache-2.0
"""The token-to-KV pool: SGLang's pool interface over an address space of pages and rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_vattn import _core, faults
from sglang_vattn.geometry import CUDA_GRANULE, HOST_GRANULE, READ_AHEAD_TOKENS, PageGeometry, page_geometry

logger = logging.getLogger(__name__)

ROWS_PER_REQUEST = 4  # rows are addresses only; spare ones mean that a released row can wait before it is unmapped
ROW_ADDRESS_BYTES = (
    32 << 40
)  # one reservation of 64 TiB works on the H200 (docs/benchmarks.md), 128 TiB is all of x86-64


class RowPlan(NamedTuple):
    """What the rows must hold; known to SGLang's request pool, not to the KV pool's constructor."""

    requests: int
    tokens: int
    rows: int | None  # as asked for by --vattn-rows


def granule_bytes(device: str) -> int:
    """The smallest piece that the driver of ``device`` maps, in bytes.

    ``VATTN_HOST_GRANULE`` lets the host use CUDA's 2 MiB, to test that geometry without a GPU.
    """
    if device.startswith("cuda"):
        return CUDA_GRANULE
    return int(os.environ.get("VATTN_HOST_GRANULE", HOST_GRANULE))


class VattnPool(MHATokenToKVPool):
    """MHA KV pool whose slots live in the home arena and whose requests have rows of their own.

    ``k_buffer[layer]`` and ``v_buffer[layer]`` are views over the home arena, shape (slots, heads, dim), with the
    token stride between slots; every kernel of SGLang that goes by slot numbers works on them.
    ``k_rows[layer]`` and ``v_rows[layer]`` are views over the rows, shape (rows, row_tokens, heads, dim).
    The former have SGLang's ``store_dtype`` (uint8 for fp8), the latter ``dtype``, as kernels want them.
    """

    row_plan: ClassVar[RowPlan]  # set by the hook around SGLang's pool builder, read once by the constructor

    def _create_buffers(self) -> None:
        if self.is_quantized_kv_cache or self.post_capture_active or self.kv_cache_layout != "nhd":
            raise ValueError(
                f"--kv-backend vattn does not support this KV cache (layout {self.kv_cache_layout}, "
                f"{type(self.quant_method).__name__}): use --kv-backend default"
            )
        for scales in ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "native_v_scale_buffer"):
            setattr(self, scales, None)
        self.dq_k_buffer = self.dq_v_buffer = None

        self.geometry = page_geometry(
            layers=self.layer_num,
            kv_heads=self.head_num,
            k_dim=self.head_dim,
            v_dim=self.v_head_dim,
            itemsize=self.store_dtype.itemsize,
            granule_bytes=granule_bytes(self.device),
            page_size=self.page_size,
            stripes=int(os.environ.get("VATTN_STRIPES", 0)) or None,
        )
        self.num_pages = self.size // self.page_size
        if self.num_pages < 1:
            raise ValueError(
                f"--kv-backend vattn: a pool of {self.size} tokens holds no page of {self.page_size} tokens: "
                "raise --max-total-tokens or --mem-fraction-static"
            )
        self.read_ahead = READ_AHEAD_TOKENS[torch.device(self.device).type]
        self.space = _open_space(self.device, self.geometry, self.num_pages, self.row_plan, self.read_ahead)
        self.row_tokens = self.space.pages_per_row * self.page_size

        home = torch.from_dlpack(self.space.home())
        rows = torch.from_dlpack(self.space.rows())
        slots = (self.num_pages + 1) * self.page_size  # the padding page and the usable ones, not the guard page
        self.home_tokens = home.view(self.geometry.stripes, -1, self.geometry.token_stride)  # (stripes, slots, bytes)
        word = torch.int32 if self.geometry.token_stride % 4 == 0 else torch.uint8  # a byte at a time is slow
        self._stripes = home.view(word).view(self.geometry.stripes, len(self.home_tokens[0]), -1).unbind()
        self.k_buffer, self.v_buffer = self._layer_views(home, self.store_dtype, (slots,), (1,))
        self.k_rows, self.v_rows = self._layer_views(
            rows, self.dtype, (self.space.num_rows, self.row_tokens), (self.row_tokens, 1)
        )
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()
        self._layer_at = {buffer.data_ptr(): layer for layer, buffer in enumerate(self.k_buffer)}
        self._copies: list[tuple[int, int, int]] = []
        self._zeroes: list[tuple[int, int]] = []
        logger.info("vattn pool: %s", self.describe())

    def _layer_views(
        self, flat: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V of each layer over ``flat`` (bytes): ``shape + (heads, dim)``, ``strides`` counted in tokens."""
        typed, stripes = flat.view(dtype), self.geometry.stripes
        token, stripe = self.geometry.token_stride // dtype.itemsize, len(flat) // dtype.itemsize // stripes
        k_elements, v_elements = self.head_num * self.head_dim, self.head_num * self.v_head_dim
        leading = tuple(stride * token for stride in strides)

        def view(dim: int, offset: int) -> torch.Tensor:
            return typed.as_strided((*shape, self.head_num, dim), (*leading, dim, 1), offset)

        in_stripe = self.layer_num // stripes
        starts = [
            layer // in_stripe * stripe + layer % in_stripe * (k_elements + v_elements)
            for layer in range(self.layer_num)
        ]
        return (
            [view(self.head_dim, start) for start in starts],
            [view(self.v_head_dim, start + k_elements) for start in starts],
        )

    def rows_of(self, k_buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and V rows of the layer whose home slots ``k_buffer`` holds."""
        layer = self._layer_at[k_buffer.data_ptr()]
        return self.k_rows[layer], self.v_rows[layer]

    def copy_partial(self, source: int, target: int, tokens: int) -> None:
        """Queue the copy of the first ``tokens`` tokens, all layers, from one page into another.

        Only queued: the source may still be written by a forward in flight. :meth:`flush` issues the copies on
        the stream of the forward that needs them, behind all earlier ones.
        """
        self._copies.append((source, target, tokens))

    def zero(self, page: int, first_token: int = 0) -> None:
        """Queue the zeroing of a page from ``first_token`` on; no-op on the host.

        Kernels multiply what they read past a row's end by zero, so it must be finite, and the page's last
        owner may have left a NaN there.
        """
        if self.device != "cpu" and first_token < self.page_size:
            self._zeroes.append((page, first_token))

    def scrub(self, page: int) -> None:
        """Queue the zeroing of a whole page, on the host too: it changes tenant (``--vattn-scrub``)."""
        self._zeroes.append((page, 0))

    def flush(self) -> None:
        """Issue the queued zeroing, then the copies, on the current stream, many pages a launch.

        Each is contiguous within a stripe. No copy reads what another writes: sources are pages of the prefix tree,
        targets are not in it yet.
        """
        if self._zeroes:
            torch._foreach_zero_(self._slices((page, first, self.page_size) for page, first in self._zeroes))
        if self._copies:
            targets = self._slices((target, 0, tokens) for _, target, tokens in self._copies)
            sources = self._slices((source, 0, tokens) for source, _, tokens in self._copies)
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self.drop_queued()

    def _slices(self, spans: Iterable[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Tokens [first, end) of a page, for each (page, first, end): a dense view a stripe."""
        bounds = [(page * self.page_size + first, page * self.page_size + end) for page, first, end in spans]
        return [stripe[start:end] for start, end in bounds for stripe in self._stripes]

    def poison(self, pages: list[int]) -> None:
        """Fill pages with NaN (all bits set). For tests (``VATTN_TEST_POISON``): nobody may read free pages."""
        for page in pages:
            self.home_tokens[:, page * self.page_size : (page + 1) * self.page_size].fill_(0xFF)

    def drop_queued(self) -> list[int]:
        """Forget queued operations; for a flush of the cache, when nobody waits for them.

        Returns the pages that are not zeroed after all.
        """
        pages = [page for page, _ in self._zeroes]
        self._zeroes.clear()
        self._copies.clear()
        return pages

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Physical bytes of K and of V, all layers; not the size of the address range."""
        k_share = self.head_dim / (self.head_dim + self.v_head_dim)
        k_bytes = int(self.space.physical_bytes * k_share)
        return k_bytes, self.space.physical_bytes - k_bytes

    def get_contiguous_buf_infos(self) -> Any:
        raise NotImplementedError("--kv-backend vattn: KV transfer between servers is not supported")

    def describe(self) -> str:
        g, space = self.geometry, self.space
        text = (
            f"{self.num_pages} pages of {self.page_size} tokens ({g.page_bytes / 2**20:.4g} MiB, "
            f"{g.token_bytes} bytes a token, {g.stripes} stripes), {space.physical_bytes / 2**30:.2f} GiB physical, "
            f"{space.num_rows} rows of {self.row_tokens} tokens"
        )
        if g.padding:
            text += f"; {g.padding:.1%} of each token is padding, which no page size of up to 2048 tokens avoids"
        return text


def open_driver(device: str, stripes: int = 1) -> _core.Driver:
    """What maps the pages of ``device``. Tests put another here, or rig it (:mod:`sglang_vattn.faults`)."""
    driver: _core.Driver
    if device.startswith("cuda"):
        index = torch.device(device).index
        driver = _core.CudaDriver(torch.cuda.current_device() if index is None else index)
    else:
        driver = _core.HostDriver(granule_bytes(device))
    if stripes > 1:
        driver = _core.StripedDriver(driver, stripes)
    return faults.rigged(driver)


def _open_space(
    device: str, geometry: PageGeometry, num_pages: int, plan: RowPlan, read_ahead: int
) -> _core.AddressSpace:
    page_size = geometry.page_size
    pages_per_row = -(-(plan.tokens + read_ahead) // page_size)
    by_addresses = ROW_ADDRESS_BYTES // (pages_per_row * geometry.page_bytes)
    num_rows = 1 + (plan.rows or min(ROWS_PER_REQUEST * plan.requests, by_addresses))
    if num_rows < 2:
        raise ValueError(
            f"--kv-backend vattn: a row of {plan.tokens} tokens is larger than the range of addresses: "
            "lower --context-length"
        )
    driver = open_driver(device, geometry.stripes)
    try:
        space = _core.AddressSpace(
            driver,
            num_pages,
            geometry.stripe_bytes,
            num_rows,
            pages_per_row,
            max_mappings=int(os.environ.get("VATTN_MAX_MAPPINGS", 0)),
            dummy_row_pages=-(-(1 + read_ahead) // page_size),
        )
    except _core.DriverError as error:
        memory, addresses = num_pages * geometry.page_bytes, num_rows * pages_per_row * geometry.page_bytes
        raise _core.DriverError(
            f"--kv-backend vattn: {memory / 2**30:.2f} GiB of KV cache in {addresses / 2**30:.0f} GiB of addresses "
            f"could not be set up: {error}. If memory is short (another process may have taken some), lower "
            "--mem-fraction-static or --max-total-tokens; if addresses are, lower --vattn-rows or --context-length"
        ) from error
    faults.begin(driver)
    return space
