# SPDX-License-Identifier: Apache-2.0
"""Device code around two-level decode: what comes before both attention calls, and the merge of their results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _own_pages_kernel(
    req_to_token, req_to_token_stride, slots, seq_lens, shared_pages, page_table, page_table_stride, own_lens,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    shared = tl.load(shared_pages + request)
    own = tl.load(seq_lens + request).to(tl.int32) - shared * PAGE
    tl.store(own_lens + request, own)
    tokens = req_to_token + slot * req_to_token_stride + shared * PAGE
    for start in range(0, tl.cdiv(own, PAGE), BLOCK):
        page = start + tl.arange(0, BLOCK)
        used = page * PAGE < own
        token = tl.load(tokens + page * PAGE, mask=used, other=0)
        tl.store(page_table + request * page_table_stride + page, (token // PAGE).to(tl.int32), mask=used)


def own_part(
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    shared_pages: torch.Tensor,
    page_size: int,
    *,
    page_table: torch.Tensor,
    own_lens: torch.Tensor,
) -> None:
    """Page numbers and length of what each request reads for itself alone, behind its shared pages.

    Parameters
    ----------
    req_to_token : (request slots, max tokens) int32
        SGLang's table of home slots.
    slots, seq_lens, shared_pages : (batch,) integers
        Request slot, length in tokens, leading pages that its group reads.
    page_table : (batch, pages) int32, written; own_lens : (batch,) int32, written
    """
    _own_pages_kernel[(len(seq_lens),)](
        req_to_token, req_to_token.stride(0), slots, seq_lens, shared_pages, page_table, page_table.stride(0),
        own_lens, PAGE=page_size, BLOCK=64,
    )  # fmt: skip


@triton.jit
def _copy(source, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    for start in tl.static_range(0, COUNT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < COUNT), mask=at < COUNT)


@triton.jit
def _store_and_order_kernel(
    q, q_stride, k, k_stride, v, v_stride, slots, k_slots, k_slot_stride, v_slots, v_slot_stride, position, ordered_q,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    _copy(k + request * k_stride, k_slots + slot * k_slot_stride, K, BLOCK)
    _copy(v + request * v_stride, v_slots + slot * v_slot_stride, V, BLOCK)
    _copy(q + request * q_stride, ordered_q + tl.load(position + request).to(tl.int64) * Q, Q, BLOCK)


def store_and_order(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """One launch for two copies: this step's K and V to their slots, the queries into the order of the groups.

    Parameters
    ----------
    q : (batch, heads, dim); k, v : (batch, KV heads, dim) or (batch, KV heads * dim)
        Contiguous but for the first dimension.
    slots : (batch,) integers
        Home slots.
    k_slots, v_slots : (slots, KV heads, dim), written
        One layer's home slots, of k's dtype.
    position : (batch,) int32
        Where a request stands in the order of the groups.

    Returns
    -------
    (batch, heads, dim)
    """
    ordered_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _store_and_order_kernel[(len(q),)](
        q, q.stride(0), k, k.stride(0), v, v.stride(0), slots, k_slots, k_slots.stride(0), v_slots, v_slots.stride(0),
        position, ordered_q,
        Q=q[0].numel(), K=k[0].numel(), V=v[0].numel(), BLOCK=1024, num_warps=8,
    )  # fmt: skip
    return ordered_q


@triton.jit
def _merge_kernel(
    shared_out, shared_lse, own_out, own_lse, position, shared_pages, out, batch, HEADS: tl.constexpr, DIM: tl.constexpr
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM)
    own_at = (request * HEADS + head) * DIM + dim
    own = tl.load(own_out + own_at).to(tl.float32)
    if tl.load(shared_pages + request) > 0:
        at = tl.load(position + request)
        shared = tl.load(shared_out + (at * HEADS + head) * DIM + dim).to(tl.float32)
        shared_weight = tl.load(shared_lse + head * batch + at)
        own_weight = tl.load(own_lse + head * batch + request)
        highest = tl.maximum(shared_weight, own_weight)
        shared_weight = tl.exp(shared_weight - highest)
        own_weight = tl.exp(own_weight - highest)
        own = (shared * shared_weight + own * own_weight) / (shared_weight + own_weight)
    tl.store(out + own_at, own.to(out.dtype.element_ty))


def merge(
    shared_out: torch.Tensor,
    shared_lse: torch.Tensor,
    own_out: torch.Tensor,
    own_lse: torch.Tensor,
    position: torch.Tensor,
    shared_pages: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Both parts of each request's attention, weighted by their log-sum-exp (as in FlashAttention's split-KV).

    Parameters
    ----------
    shared_out, own_out, out : (batch, heads, dim)
        ``shared_out`` in the order of the groups; dim a power of two.
    shared_lse, own_lse : (heads, batch) float32
        Natural logarithm.
    position : (batch,) int32
        Where a request stands in the order of the groups.
    shared_pages : (batch,) int32
        0 for requests in no group: their ``shared_out`` is undefined, and not read.
    """
    batch, heads, dim = own_out.shape
    _merge_kernel[(batch, heads)](
        shared_out, shared_lse, own_out, own_lse, position, shared_pages, out, batch, HEADS=heads, DIM=dim
    )
    return out
