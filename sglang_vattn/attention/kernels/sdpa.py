# SPDX-License-Identifier: Apache-2.0
"""torch's scaled dot-product attention, one request at a time, each row handed over as a view. Host and GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_vattn.attention.kernels.base import RowBatch, RowKernel


class Sdpa(RowKernel):
    """Reads no key past a row's length. fp8 rows are widened, a request at a time."""

    name = "sdpa"
    package = "torch"
    module = "torch"
    devices = ("cpu", "cuda")
    kv_dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
    capturable = False  # lengths are host integers
    softcap = False

    def __init__(self) -> None:
        pass

    def __call__(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        batch: RowBatch,
        *,
        scale: float,
        softcap: float = 0.0,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        need_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert not softcap
        out = q.new_empty(*q.shape[:2], v_rows.shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if need_lse else None
        for start, end, row, length in batch.spans:
            k, v = k_rows[row, :length].to(q.dtype), v_rows[row, :length].to(q.dtype)
            if k_scale is not None and v_scale is not None:
                k, v = k * k_scale.to(q.dtype), v * v_scale.to(q.dtype)
            out[start:end] = attend(q[start:end], k, v, scale)
            if lse is not None:  # SDPA has one, and keeps it to itself
                lse[start:end] = log_sum_exp(q[start:end], k, scale)
        return out, lse


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
    # The KV heads stand in for the batch, so that a group of query heads reads one KV head.
    keys, values = k.permute(1, 0, 2)[:, None], v.permute(1, 0, 2)[:, None]  # (kv_heads, 1, length, dim)
    if new == 1:  # the group stands in for the query length: one pass over K and V
        queries = q.view(kv_heads, 1, group, -1)
        return scaled_dot_product_attention(queries, keys, values, scale=scale).reshape(1, q_heads, -1)
    mask = None if length == new else causal_mask(new, length, q.device)
    if q.device.type == "cpu":  # its kernel knows groups by itself, and leaves the heads of a token together
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    out = scaled_dot_product_attention(
        q.view(new, kv_heads, group, -1).permute(1, 2, 0, 3),
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(new, q_heads, -1)


def causal_mask(new: int, length: int, device: torch.device) -> torch.Tensor:
    """Which of ``length`` keys each of the last ``new`` tokens sees, bool (new, length)."""
    last = torch.arange(length - new, length, device=device)[:, None]
    return torch.arange(length, device=device)[None] <= last


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Of the scores of :func:`attend`, float32 (new, q_heads)."""
    new, q_heads, _ = q.shape
    length, kv_heads, _ = k.shape
    queries = q.float().view(new, kv_heads, q_heads // kv_heads, -1)
    scores = torch.einsum("nhgd,lhd->nhgl", queries, k.float()) * scale
    hidden = ~causal_mask(new, length, q.device)[:, None, None]
    return scores.masked_fill_(hidden, float("-inf")).logsumexp(-1).view(new, q_heads)
