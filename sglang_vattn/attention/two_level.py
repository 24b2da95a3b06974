# SPDX-License-Identifier: Apache-2.0
"""Device code around two-level decode: the page table of each request's own part, and the merge of both parts."""

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
