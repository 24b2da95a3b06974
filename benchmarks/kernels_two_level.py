# SPDX-License-Identifier: Apache-2.0
"""Decode with a shared prefix: one level by pages and by rows, against two levels merged, as our FA3 backend does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

from benchmarks.common import Row
from benchmarks.kernels_cuda import Call, compare, fa3_by_row, fa3_paged
from benchmarks.kernels_memory import DIM, HEADS, KV_HEADS, PAGE, Memory, int32
from sglang_vattn.attention.groups import GroupBuffers
from sglang_vattn.attention.two_level import merge, own_part

BYTES_PER_MS = 4.5e9  # of memory bandwidth, for the floor


class Shared(NamedTuple):
    """``groups`` prefixes of ``prefix`` tokens, shared evenly by ``batch`` requests with ``own`` tokens each."""

    batch: int
    prefix: int
    own: int
    groups: int = 1

    def __str__(self) -> str:
        text = f"shared {self.batch} x ({self.prefix} + {self.own})"
        return text if self.groups == 1 else f"{text}, {self.groups} groups"


CASES = (
    Shared(8, 8192, 256), Shared(16, 8192, 256), Shared(64, 1024, 256), Shared(64, 8192, 64), Shared(64, 8192, 256),
    Shared(64, 8192, 256, 8), Shared(128, 2048, 256), Shared(32, 16384, 256), Shared(256, 4096, 128),
)  # fmt: skip
SMALL_CASES = (Shared(64, 8192, 256),)


def lists(memory: Memory, case: Shared) -> tuple[list[list[int]], list[list[int]]]:
    """Pages of each prefix, and of each request."""
    prefix_pages = case.prefix // PAGE
    own_pages = -(-(case.own + memory.read_ahead) // PAGE)
    order = iter(memory.order)
    prefixes = [[next(order) for _ in range(prefix_pages)] for _ in range(case.groups)]
    members = case.batch // case.groups
    requests = [prefixes[i // members] + [next(order) for _ in range(own_pages)] for i in range(case.batch)]
    return prefixes, requests


def two_level(
    memory: Memory, case: Shared, q: torch.Tensor, prefix_rows: list[int], slots: torch.Tensor
) -> Callable[[int], Call]:
    """As ``SharedDecode.forward``, but for the store: both calls side by side, the own part first, then the merge."""
    batch, members = case.batch, case.batch // case.groups
    groups: Any = [
        SimpleNamespace(
            members=list(range(i * members, (i + 1) * members)),
            node=SimpleNamespace(end=case.prefix // PAGE, row=prefix_rows[i]),
        )
        for i in range(case.groups)
    ]
    buffers = GroupBuffers(batch, PAGE, "cuda")
    buffers.update(groups, 1)
    own_lens = torch.empty(batch, dtype=torch.int32, device="cuda")
    page_table = torch.zeros(batch, -(-case.own // PAGE), dtype=torch.int32, device="cuda")
    index = torch.arange(batch, dtype=torch.int64, device="cuda")
    lengths = torch.full((batch,), case.prefix + case.own, dtype=torch.int64, device="cuda")
    own_part(slots, index, lengths, buffers.shared_pages, PAGE, page_table=page_table, own_lens=own_lens)
    each = int32(range(batch + 1))
    out = torch.empty_like(q)
    side = torch.cuda.Stream()
    common: dict[str, Any] = {"softmax_scale": DIM**-0.5, "return_softmax_lse": True, "ver": 3}

    def of_layer(layer: int) -> Call:
        (k_rows, v_rows), (k_pages, v_pages) = memory.rows[layer], memory.paged(layer, PAGE, home=True)

        def call() -> torch.Tensor:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                own, own_lse, *_ = flash_attn_with_kvcache(
                    q=q, k_cache=k_pages, v_cache=v_pages, page_table=page_table, cache_seqlens=own_lens,
                    cu_seqlens_q=each, max_seqlen_q=1, causal=True, **common,
                )  # fmt: skip
            shared, shared_lse, *_ = flash_attn_with_kvcache(
                q=q.index_select(0, buffers.order), k_cache=k_rows, v_cache=v_rows, cache_batch_idx=buffers.rows,
                cache_seqlens=buffers.prefix_tokens, cu_seqlens_q=buffers.bounds, max_seqlen_q=batch,
                causal=False, **common,
            )  # fmt: skip
            main.wait_stream(side)
            return merge(shared, shared_lse, own, own_lse, buffers.position, buffers.shared_pages, out)

        return call

    return of_layer


def one_level(
    memory: Memory, case: Shared, q: torch.Tensor, rows: list[int], slots: torch.Tensor
) -> dict[str, Callable[[int], Call]]:
    common: dict[str, Any] = {
        "q": q,
        "cache_seqlens": int32([case.prefix + case.own] * case.batch),
        "cu_seqlens_q": int32(range(case.batch + 1)),
        "max_seqlen_q": 1,
        "softmax_scale": DIM**-0.5,
        "causal": True,
        "ver": 3,
    }
    arms = {f"paged{page}": fa3_paged(memory, page, memory.table(slots, page), common) for page in (1, PAGE)}
    return {**arms, "rows": fa3_by_row(memory, rows, common)}


def measure_two_level(memory: Memory, rounds: int, small: bool, has: Callable[..., bool]) -> Iterator[Row]:
    for case in SMALL_CASES if small else CASES:
        if has(kernel="fa3", case=str(case)):
            continue
        prefixes, requests = lists(memory, case)
        guards = [memory.space.guard_page] * -(-memory.read_ahead // PAGE)
        length = case.prefix + case.own
        slots = torch.stack([memory.slots_of(pages, length) for pages in requests])
        q = torch.randn(case.batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        with memory.backed([*requests, *(pages + guards for pages in prefixes)]) as rows:
            arms = one_level(memory, case, q, rows[: case.batch], slots)
            arms["two_level"] = two_level(memory, case, q, rows[case.batch :], slots)
            unique = (case.groups * case.prefix + case.batch * case.own) * KV_HEADS * DIM * 4
            yield compare("fa3", str(case), arms, rounds, kind="shared", floor_ms=unique / BYTES_PER_MS)
