# SPDX-License-Identifier: Apache-2.0
"""Attention on the host: a kernel over each request's row, handed over as a view, by default torch's SDPA."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.attention.kernels import RowBatch, RowKernel
from sglang_vattn.attention.kernels.sdpa import Partial, attend, attend_partial, merge


class HostRowBackend(TorchNativeAttnBackend):
    """``torch_native`` without its gather: no index, no copy of K or V, no padding of the query.

    A batch whose rows are not ready, and what rows do not serve (cross attention, sliding windows, encoders),
    takes SGLang's own path by home slots.
    """

    def __init__(self, runner: Any, kernel: RowKernel) -> None:
        super().__init__(runner)
        self.kernel = kernel
        self.allocator: VattnAllocator = runner.token_to_kv_pool_allocator
        self.allocator.reading.share_possible = True

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        causal: bool = False,
        sliding_window_size: int | None = None,
        **kw: Any,
    ) -> torch.Tensor:
        if not (causal and _plain(encoder_lens, sliding_window_size) and self.allocator.reading.by_rows):
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling=scaling, causal=causal,
                sliding_window_size=sliding_window_size, **kw,
            )  # fmt: skip
        batch = self._batch(req_pool_indices, seq_lens, extend_seq_lens)
        return self._attend(query, output, k_cache, batch, scaling)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **kw: Any,
    ) -> torch.Tensor:
        reading = self.allocator.reading
        if not (_plain(encoder_lens, sliding_window_size) and (reading.by_rows or reading.groups)):
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling=scaling, sliding_window_size=sliding_window_size, **kw,
            )  # fmt: skip
        if not reading.groups:
            batch = self._batch(req_pool_indices, seq_lens, torch.ones_like(seq_lens))
            return self._attend(query, output, k_cache, batch, scaling)
        shared: dict[int, tuple[int, Partial]] = {}  # index in the batch -> (tokens, its attention to them)
        for group in reading.groups:
            tokens = group.node.end * self.allocator.page_size
            k, v = self._row(query, k_cache, group.node.row, 0, tokens)
            together = attend_partial(query[group.members], k, v, scaling)
            shared |= {i: (tokens, Partial(*part)) for i, *part in zip(group.members, *together, strict=True)}
        for i, (slot, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
            start, prefix = shared.get(i, (0, None))
            if reading.by_rows:
                k, v = self._row(query, k_cache, self.allocator.requests[slot].row, start, length)
            else:
                slots = req_to_token[slot, start:length]
                k, v = k_cache[slots].to(query.dtype), v_cache[slots].to(query.dtype)
            if prefix is None:
                output[i : i + 1] = attend(query[i : i + 1], k, v, scaling)
            else:
                output[i] = merge(
                    prefix, Partial(*(part[0] for part in attend_partial(query[i : i + 1], k, v, scaling)))
                )
        return output

    def _batch(self, slots: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor) -> RowBatch:
        """The rows of a forward, whose requests have these slots, lengths and numbers of queries."""
        rows = torch.tensor([self.allocator.requests[slot].row for slot in slots.tolist()], dtype=torch.int32)
        bounds = torch.nn.functional.pad(torch.cumsum(new, dim=0, dtype=torch.int32), (1, 0))
        return RowBatch(rows, lengths.to(torch.int32), bounds, int(new.max()), int(lengths.max()))

    def _attend(
        self, query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor, batch: RowBatch, scale: float | None
    ) -> torch.Tensor:
        k_rows, v_rows = self.token_to_kv_pool.rows_of(k_cache)
        out, _ = self.kernel(query, k_rows, v_rows, batch, scale=query.shape[-1] ** -0.5 if scale is None else scale)
        return output.copy_(out)

    def _row(
        self, query: torch.Tensor, k_cache: torch.Tensor, row: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens [start, end) in a row, (tokens, heads, dim): views, unless they are fp8.

        SGLang's interface names the layer by its cache tensors.
        """
        k_rows, v_rows = self.token_to_kv_pool.rows_of(k_cache)
        return k_rows[row, start:end].to(query.dtype), v_rows[row, start:end].to(query.dtype)


def _plain(encoder_lens: torch.Tensor | None, sliding_window_size: int | None) -> bool:
    """Whether the layer is one that rows serve: no encoder, no window."""
    return encoder_lens is None and (sliding_window_size is None or sliding_window_size < 0)
