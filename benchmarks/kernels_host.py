# SPDX-License-Identifier: Apache-2.0
"""Host kernels: SGLang's torch_native, which gathers K and V by slot, against the same attention over rows.

``stock`` is SGLang's own method over its own layout, a tensor a layer with the request's slots in order, which is its
best case. ``rows`` is ours over a row of an address space whose pages are in random order; ``pages`` is SGLang's
method over the home slots of the same pages: what a batch takes whose rows are not mapped.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from benchmarks.common import Row, alternately, median, quartile_spread
from sglang_vattn import _core
from sglang_vattn.attention.kernels.sdpa import attend
from sglang_vattn.geometry import page_geometry

LAYERS = 4
ROUNDS = 15
BUDGET_S = 8.0  # a case; the longest take fewer rounds
LONG = 4096


class Heads(NamedTuple):
    q: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.q}/{self.kv} x {self.dim}"


class Case(NamedTuple):
    heads: Heads
    kind: str
    new: int
    context: int  # tokens with the new ones

    def __str__(self) -> str:
        return f"{self.kind} {self.heads}, {self.new} of {self.context}"

    def is_long(self) -> bool:
        """Stock computes the queries of the whole sequence, so its time grows with the square of it."""
        return self.kind == "extend" and self.context > LONG


LLAMA, TINY = Heads(32, 8, 128), Heads(4, 2, 32)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)


def cases(small: bool) -> list[Case]:
    out = []
    for heads in (LLAMA, TINY):
        for context in (512, 2048) if small else CONTEXTS:
            out.append(Case(heads, "decode", 1, context))
            out.append(Case(heads, "extend", 256, context))
        for context in (512,) if small else (256, 512, 1024, 2048, 4096):
            out.append(Case(heads, "cold", context, context))
    return sorted(out, key=Case.is_long)  # minutes each, so last


class Memory:
    """One request's K and V in stock's layout and in ours, the same numbers."""

    def __init__(self, heads: Heads, context: int) -> None:
        geometry = page_geometry(
            layers=LAYERS, kv_heads=heads.kv, k_dim=heads.dim, v_dim=heads.dim, itemsize=4, granule_bytes=4096
        )
        pages = -(-context // geometry.page_size)
        self.space = _core.AddressSpace(_core.HostDriver(), pages, geometry.page_bytes, 2, pages)
        order = list(range(1, pages + 1))
        random.Random(0).shuffle(order)
        row = self.space.acquire_row()
        self.space.map(row, 0, order)
        if not self.space.wait(row, pages, 60.0):
            raise RuntimeError(self.space.error(row) or "the row was not mapped in a minute")
        floats = geometry.token_bytes // 4
        size = geometry.page_size
        rows = torch.from_dlpack(self.space.rows()).view(torch.float32)
        home = torch.from_dlpack(self.space.home()).view(torch.float32)
        width = heads.kv * heads.dim

        def view(flat: torch.Tensor, tokens: int, first: int, offset: int) -> torch.Tensor:
            shape, strides = (tokens, heads.kv, heads.dim), (floats, heads.dim, 1)
            return flat.as_strided(shape, strides, first * floats + offset)

        self.k_row, self.v_row = (view(rows, context, row * pages * size, i * width) for i in (0, 1))
        self.k_home, self.v_home = (view(home, (pages + 1) * size, 0, i * width) for i in (0, 1))
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = (
            torch.randn(context + 1, heads.kv, heads.dim, generator=generator) for _ in range(2)
        )  # slot 0 is padding
        self.k_row.copy_(self.k[1:])
        self.v_row.copy_(self.v[1:])
        self.slots = torch.arange(1, context + 1, dtype=torch.int32)[None]
        home_slots = [page * size + i for page in order for i in range(size)][:context]
        self.home_slots = torch.tensor(home_slots, dtype=torch.int32)[None]

    def close(self) -> None:
        del self.k_row, self.v_row, self.k_home, self.v_home
        self.space.close()


def calls(case: Case, memory: Memory) -> dict[str, Callable[[], torch.Tensor]]:
    """The arms of a case, each from queries to output."""
    stock = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    new, context, scale = case.new, case.context, case.heads.dim**-0.5
    q = torch.randn(new, case.heads.q, case.heads.dim, generator=torch.Generator().manual_seed(1))
    index, length = torch.tensor([0]), torch.tensor([context])
    prefix, extend = torch.tensor([context - new]), torch.tensor([new])

    def by_slots(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Callable[[], torch.Tensor]:
        out = torch.empty_like(q)
        common: dict[str, Any] = {"scaling": scale, "enable_gqa": True}
        if case.kind == "decode":
            return lambda: stock._run_sdpa_forward_decode(q, out, k, v, slots, index, length, causal=False, **common)
        return lambda: stock._run_sdpa_forward_extend(
            q, out, k, v, slots, index, length, prefix, extend, causal=True, **common
        )

    out = torch.empty_like(q)
    return {
        "stock": by_slots(memory.k, memory.v, memory.slots),
        "rows": lambda: out.copy_(attend(q, memory.k_row, memory.v_row, scale)),
        "pages": by_slots(memory.k_home, memory.v_home, memory.home_slots),
    }


def measure(args: argparse.Namespace, has: Callable[..., bool]) -> Iterator[Row]:
    torch.set_flush_denormal(True)  # stock pads the query with memory that nobody wrote
    # On one thread, its CPU time: what else the machine does is left out.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    rounds = args.rounds or (5 if args.small else ROUNDS)
    for case in cases(args.small):
        if has(kernel="torch_native", case=str(case)):
            continue
        memory = Memory(case.heads, case.context)
        arms = calls(case, memory)
        if case.is_long():
            del arms["pages"]  # stock's method again
        expected = arms["stock"]().clone()  # warms it up, too
        errors = {name: float((call() - expected).abs().max()) for name, call in arms.items() if name != "stock"}
        budget_s = 2.0 if args.small else BUDGET_S
        raw = alternately(arms, rounds, warmup=0, least=1 if case.is_long() else 3, budget_s=budget_s, clock=clock)
        ms = {name: median(values) * 1e3 for name, values in raw.items()}
        yield {
            "kernel": "torch_native",
            "case": str(case),
            "kind": case.kind,
            "heads": str(case.heads),
            "new": case.new,
            "context": case.context,
            "threads": torch.get_num_threads(),
            "clock": clock.__name__,
            "ms": ms,
            "speedup": ms["stock"] / ms["rows"],
            "max_error": errors,
            "spread": {name: quartile_spread(values) for name, values in raw.items()},
            "raw": raw,
        }
        del arms
        memory.close()
