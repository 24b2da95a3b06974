# SPDX-License-Identifier: Apache-2.0
"""GPU kernels: the same attention by page tables of 1, 16, 64 and 128 tokens, and by rows.

Paged arms read stock's layout, a tensor a layer; ``rows`` and ``home128`` read an address space of ours, all layers of
a token together. Slot numbers are the same in both: pages of 128 tokens in random order, cut into the smaller sizes
(``paged1_random``: every token anywhere). Each measurement is one replay of a CUDA graph of all layers' calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch

from benchmarks.common import Row, median, spread
from benchmarks.kernels_memory import DIM, HEADS, KV_HEADS, LAYERS, PAGE, Memory, int32
from sglang_vattn.attention.kernels import RowBatch, RowKernel, load, refusal

ROUNDS = 20
PAGES = (1, 16, 64, 128)
Call = Callable[[], torch.Tensor]


class Case(NamedTuple):
    kind: str
    batch: int
    new: int
    prefix: int

    def __str__(self) -> str:
        return f"{self.kind} {self.batch} x {self.new} on {self.prefix}"

    @property
    def length(self) -> int:
        return self.new + self.prefix


CASES = (
    *(Case("decode", batch, 1, length - 1) for batch, length in
      ((1, 131072), (8, 4096), (16, 32768), (64, 8192), (256, 2000))),
    Case("prefill", 1, 8192, 0),
    Case("prefill", 8, 1024, 0),
    Case("extend", 1, 2048, 30720),
    Case("extend", 4, 512, 8192),
    Case("extend", 16, 128, 8192),
)  # fmt: skip
SMALL_CASES = (Case("decode", 8, 1, 4095), Case("extend", 4, 512, 8192))


def graph_times(calls: list[Call], rounds: int) -> list[float]:
    """Milliseconds a call, of each replay of a graph of these calls (one a layer, so no cache serves them)."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    out = []
    for number in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            out.append(begin.elapsed_time(end) / len(calls))
    return out


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative, over the whole output."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def compare(kernel: str, case: str, arms: dict[str, Callable[[int], Call]], rounds: int, **fields: Any) -> Row:
    """Time each arm's calls over all layers; the first arm is what errors and speed-ups refer to."""
    expected: torch.Tensor | None = None
    raw, errors, failed = {}, {}, {}
    for name, of_layer in arms.items():
        try:
            out = of_layer(0)().clone()
            expected = out if expected is None else expected
            errors[name] = difference(out.view_as(expected), expected)
            raw[name] = graph_times([of_layer(layer) for layer in range(LAYERS)], rounds)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
            # an arm that this build of the kernel lacks
            failed[name] = str(error)[:200]
    if "paged1_random" in errors:
        errors.pop("paged1_random")  # reads other slots
    return {
        "kernel": kernel,
        "case": case,
        **fields,
        "layers": LAYERS,
        "ms": {name: median(values) for name, values in raw.items()},
        "relative_error": errors,
        "failed": failed,
        "spread": {name: spread(values) for name, values in raw.items()},
        "raw": raw,
    }


# ---------------------------------------------------------------------- one kernel each


def fa3_paged(
    memory: Memory, page: int, table: torch.Tensor, common: dict[str, Any], *, home: bool = False
) -> Callable[[int], Call]:
    """FA3 by a page table, over stock's layout or over home slots; ``common``: the arguments of every layer's call."""
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    def of_layer(layer: int) -> Call:
        k, v = memory.paged(layer, page, home=home)
        return lambda: flash_attn_with_kvcache(k_cache=k, v_cache=v, page_table=table, **common)

    return of_layer


def fa3_by_row(memory: Memory, rows: Sequence[int], common: dict[str, Any]) -> Callable[[int], Call]:
    """FA3 over these rows."""
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    index = int32(rows)

    def of_layer(layer: int) -> Call:
        k, v = memory.rows[layer]
        return lambda: flash_attn_with_kvcache(k_cache=k, v_cache=v, cache_batch_idx=index, **common)

    return of_layer


def fa3(memory: Memory, case: Case, rows: list[int]) -> dict[str, Callable[[int], Call]]:
    q = torch.randn(case.batch * case.new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    common: dict[str, Any] = {
        "q": q,
        "cache_seqlens": int32([case.length] * case.batch),
        "cu_seqlens_q": int32([i * case.new for i in range(case.batch + 1)]),
        "max_seqlen_q": case.new,
        "softmax_scale": DIM**-0.5,
        "causal": True,
        "ver": 3,
    }
    slots = memory.slots(case.batch, case.length)
    arms = {f"paged{page}": fa3_paged(memory, page, memory.table(slots, page), common) for page in PAGES}
    anywhere = torch.randperm(memory.tokens, device="cuda")[: slots.numel()].view_as(slots).to(torch.int32)
    arms["paged1_random"] = fa3_paged(memory, 1, anywhere, common)
    arms["home128"] = fa3_paged(memory, PAGE, memory.table(slots, PAGE), common, home=True)
    arms["rows"] = fa3_by_row(memory, rows, common)
    return arms


def fa2(memory: Memory, case: Case, rows: list[int]) -> dict[str, Callable[[int], Call]]:
    """The flash-attn package; its page sizes are multiples of 256."""
    from flash_attn import flash_attn_with_kvcache

    q = torch.randn(case.batch, case.new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    common: dict[str, Any] = {"cache_seqlens": int32([case.length] * case.batch), "causal": True}
    index, slots = int32(rows), memory.slots(case.batch, case.length)

    def gathered(layer: int) -> Call:
        k, v = memory.k[layer], memory.v[layer]
        flat = slots.reshape(-1).long()

        def call() -> torch.Tensor:
            shape = (case.batch, case.length, KV_HEADS, DIM)
            out: torch.Tensor = flash_attn_with_kvcache(q, k[flat].view(shape), v[flat].view(shape), **common)
            return out

        return call

    def by_row(layer: int) -> Call:
        k, v = memory.rows[layer]
        return lambda: flash_attn_with_kvcache(q, k, v, cache_batch_idx=index, **common)

    return {"gathered": gathered, "rows": by_row}


def sdpa(memory: Memory, case: Case, rows: list[int]) -> dict[str, Callable[[int], Call]]:
    """torch's own attention, which knows no page table: decode, and prefill without a prefix."""
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.randn(case.batch, HEADS, case.new, DIM, device="cuda", dtype=torch.bfloat16)
    slots = memory.slots(case.batch, case.length)
    causal = case.new > 1

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
        )
        return out

    def gathered(layer: int) -> Call:
        k, v, flat = memory.k[layer], memory.v[layer], slots.reshape(-1).long()
        shape = (case.batch, case.length, KV_HEADS, DIM)
        return lambda: attend(k[flat].view(shape), v[flat].view(shape))

    def by_row(layer: int) -> Call:
        k, v = memory.rows[layer]
        first, last = rows[0], rows[-1] + 1
        return lambda: attend(k[first:last, : case.length], v[first:last, : case.length])

    return {"gathered": gathered, "rows": by_row}


def over_rows(name: str) -> Callable[[Memory, Case, list[int]], dict[str, Callable[[int], Call]]]:
    """A kernel of ``--vattn-kernel`` (docs/kernels.md), beside FlashAttention 3 on the same rows."""

    def arms(memory: Memory, case: Case, rows: list[int]) -> dict[str, Callable[[int], Call]]:
        batch = RowBatch(
            int32(rows),
            int32([case.length] * case.batch),
            int32([i * case.new for i in range(case.batch + 1)]),
            case.new,
            case.length,
        )
        q = torch.randn(case.batch * case.new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

        def of(kernel: RowKernel) -> Callable[[int], Call]:
            return lambda layer: lambda: kernel(q, *memory.rows[layer], batch, scale=DIM**-0.5)[0]

        return {"fa3_rows": of(load("fa3")), "rows": of(load(name))}

    return arms


KERNELS: dict[str, Callable[[Memory, Case, list[int]], dict[str, Callable[[int], Call]]]] = {
    "fa3": fa3,
    "fa2": fa2,
    "sdpa": sdpa,
    **{name: over_rows(name) for name in ("fa4", "flashinfer", "torch")},
}


def serves(kernel: str, case: Case) -> bool:
    """Whether the kernel has a form of the case: causal to the bottom right, or no mask at all."""
    return kernel != "sdpa" or case.kind in ("decode", "prefill")


def installed() -> list[str]:
    return [name for name in KERNELS if refusal(name, device="cuda") is None]


def measure(args: argparse.Namespace, has: Callable[..., bool]) -> Iterator[Row]:
    from benchmarks.kernels_two_level import measure_two_level

    rounds = args.rounds or ROUNDS
    torch.manual_seed(0)
    with closing(Memory()) as memory:
        for kernel in args.kernels or installed():
            if kernel not in KERNELS:
                raise ValueError(f"kernel {kernel!r}: choose from {', '.join(KERNELS)}")
            for case in SMALL_CASES if args.small else CASES:
                if has(kernel=kernel, case=str(case)) or not serves(kernel, case):
                    continue
                with memory.mapped(case.batch, case.length) as rows:
                    arms = KERNELS[kernel](memory, case, rows)
                    yield compare(kernel, str(case), arms, rounds, kind=case.kind)
        if "fa3" in (args.kernels or installed()):
            yield from measure_two_level(memory, rounds, args.small, has)
