# SPDX-License-Identifier: Apache-2.0
"""Attention on the host: torch's SDPA over each request's row, handed over as a view."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_vattn.allocator import VattnAllocator


class HostRowBackend(TorchNativeAttnBackend):
    """``torch_native`` without its gather: no index, no copy of K or V, no padding of the query.

    A batch whose rows are not ready, and what rows do not serve (cross attention, sliding windows, encoders),
    takes SGLang's own path by home slots.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
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
        start = 0
        for slot, length, new in zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            k, v = self._row(query, k_cache, self.allocator.requests[slot].row, 0, length)
            output[start : start + new] = attend(query[start : start + new], k, v, scaling)
            start += new
        return output

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


class Partial(NamedTuple):
    """Attention to a part of the keys: (.., heads, dim), and the log-sum-exp of its scores, (.., heads)."""

    out: torch.Tensor
    lse: torch.Tensor


def merge(a: Partial, b: Partial) -> torch.Tensor:
    """Attention to the keys of both parts."""
    weight = torch.sigmoid(a.lse - b.lse)[..., None]
    return a.out * weight + b.out * (1 - weight)


def attend_partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> Partial:
    """Attention of every query to every key.

    Parameters
    ----------
    q : (queries, q_heads, dim); k, v : (length, kv_heads, dim), (length, kv_heads, v_dim)

    Returns
    -------
    Partial
        (queries, q_heads, v_dim) and (queries, q_heads).
    """
    queries, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    folded = q.view(queries, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = torch.bmm(folded, k.permute(1, 2, 0)) * (dim**-0.5 if scale is None else scale)
    lse = scores.logsumexp(-1)
    out = torch.bmm((scores - lse[..., None]).exp_(), v.transpose(0, 1))
    return Partial(
        out.view(kv_heads, queries, q_heads // kv_heads, -1).transpose(0, 1).reshape(queries, q_heads, -1),
        lse.view(kv_heads, queries, -1).transpose(0, 1).reshape(queries, q_heads),
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence to all of it.

    Parameters
    ----------
    q : (new, q_heads, dim)
        Queries of the last ``new`` tokens.
    k, v : (length, kv_heads, dim), (length, kv_heads, v_dim)
        Any strides with the last dimension dense; not copied.

    Returns
    -------
    (new, q_heads, v_dim)
    """
    new, q_heads, _ = q.shape
    length, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    # The KV heads stand in for the batch, so that a group of query heads reads one KV head: SDPA's own
    # enable_gqa would repeat K and V for that.
    keys, values = k.permute(1, 0, 2)[:, None], v.permute(1, 0, 2)[:, None]  # (kv_heads, 1, length, dim)
    if new == 1:  # the group stands in for the query length: one pass over K and V
        queries = q.view(kv_heads, 1, group, -1)
        return scaled_dot_product_attention(queries, keys, values, scale=scale).reshape(1, q_heads, -1)
    mask = None
    if length != new:
        mask = torch.arange(length)[None] <= torch.arange(length - new, length)[:, None]
    out = scaled_dot_product_attention(
        q.view(new, kv_heads, group, -1).permute(1, 2, 0, 3),
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(new, q_heads, -1)
