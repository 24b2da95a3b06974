# SPDX-License-Identifier: Apache-2.0
"""Two-level decode: who plans the prefix call, which call goes first, how the own part is split.

Microseconds a layer, 32 layers of Llama-3-8B's heads in one graph, two stripes, with the launch that stores and orders
before it and the merge after it. `plan`: FA3's own, in each layer; or one from `get_scheduler_metadata`. `order`: one
after the other, or in two branches of the graph, the prefix or the own part first. Checks the result, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sgl_kernel.flash_attn import get_scheduler_metadata  # type: ignore[import-not-found]
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

from benchmarks.common import RESULTS, ResultFile, Row
from benchmarks.kernels_memory import DIM, HEADS, KV_HEADS, PAGE, int32
from benchmarks.probes.layout import KV, LAYERS, us_a_layer
from sglang_vattn.attention.two_level import merge, store_and_order

TOKENS, ROW_TOKENS, LONGEST, OWN = 112 * 1024, 41088, 40960, 129
PLANS, ORDERS, SPLITS = ("each layer's", "one", "one, packed"), ("serial", "prefix first", "own first"), (0, 1)
COMMON: dict[str, Any] = {"softmax_scale": DIM**-0.5, "return_softmax_lse": True, "ver": 3}
PLAN: dict[str, Any] = {"num_heads": HEADS, "num_heads_k": KV_HEADS, "headdim": DIM}


class Load(NamedTuple):
    name: str
    batch: int
    groups: int
    prefix: int


LOADS = (
    Load("one 8k prefix, 64 requests", 64, 1, 8192),
    Load("8 documents of 8k, 64 requests", 64, 8, 8192),
    Load("one 2k prefix, 128 requests", 128, 1, 2048),
    Load("one 32k prefix, 32 requests", 32, 1, 32000),
)


class Case:
    """The batch of one load: equal groups, random order, each request with OWN tokens in pages of its own."""

    def __init__(self, load: Load, kv: list[KV]) -> None:
        batch, groups, prefix = load.batch, load.groups, load.prefix
        self.load, self.kv, self.side = load, kv, torch.cuda.Stream()
        room, self.members = max(1, batch // 8), batch // groups
        self.bounds = int32([min(group, groups) * self.members for group in range(room + 1)])
        self.prefix_tokens = int32([prefix] * groups + [0] * (room - groups))
        self.rows = int32([*range(groups), *[0] * (room - groups)])
        self.position = torch.randperm(batch, device="cuda").to(torch.int32)
        self.shared_pages = int32([prefix // PAGE] * batch)
        self.own_pages = -(-OWN // PAGE)
        order = groups * prefix // PAGE + 1 + torch.randperm(batch * self.own_pages, device="cuda")
        self.own_table = order.to(torch.int32).view(batch, self.own_pages)
        self.table = torch.zeros(batch, LONGEST // PAGE, dtype=torch.int32, device="cuda")
        self.table[:, : self.own_pages] = self.own_table
        self.lens, self.each = int32([OWN] * batch), int32(range(batch + 1))
        qkv = torch.randn(batch, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.q, self.k, self.v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.slots = self.own_table[:, (OWN - 1) // PAGE].long() * PAGE + (OWN - 1) % PAGE
        # "packed" says what the kernel does by itself, heads of a KV head side by side. Not measured yet.
        self.prefix_plans: dict[str, Any] = {PLANS[0]: None}
        for plan, packed in zip(PLANS[1:], (None, True), strict=True):
            self.prefix_plans[plan] = get_scheduler_metadata(
                batch_size=room, max_seqlen_q=batch, max_seqlen_k=ROW_TOKENS, cache_seqlens=self.prefix_tokens,
                cu_seqlens_q=self.bounds, causal=False, pack_gqa=packed, **PLAN,
            )  # fmt: skip
        self.own_plans = [
            get_scheduler_metadata(
                batch_size=batch, max_seqlen_q=1, max_seqlen_k=LONGEST, cache_seqlens=self.lens,
                cu_seqlens_q=self.each, page_size=PAGE, causal=True, num_splits=splits, **PLAN,
            )
            for splits in SPLITS
        ]  # fmt: skip

    def prefix(self, layer: int, ordered_q: torch.Tensor, plan: str) -> Any:
        def rows(x: torch.Tensor) -> torch.Tensor:
            shape, stride = (self.load.groups, ROW_TOKENS, KV_HEADS, DIM), (self.load.prefix * x.stride(0), x.stride(0))
            return x.as_strided(shape, (*stride, DIM, 1), x.storage_offset())

        return flash_attn_with_kvcache(
            q=ordered_q, k_cache=rows(self.kv[layer][0]), v_cache=rows(self.kv[layer][1]), cache_batch_idx=self.rows,
            cache_seqlens=self.prefix_tokens, cu_seqlens_q=self.bounds, max_seqlen_q=self.load.batch, causal=False,
            scheduler_metadata=self.prefix_plans[plan], **COMMON,
        )[:2]  # fmt: skip

    def own(self, layer: int, splits: int) -> Any:
        k, v = (x.unflatten(0, (-1, PAGE)) for x in self.kv[layer])
        return flash_attn_with_kvcache(
            q=self.q, k_cache=k, v_cache=v, page_table=self.table, cache_seqlens=self.lens, cu_seqlens_q=self.each,
            max_seqlen_q=1, causal=True, num_splits=splits, scheduler_metadata=self.own_plans[splits], **COMMON,
        )[:2]  # fmt: skip

    def layer(self, layer: int, plan: str, order: str, splits: int) -> torch.Tensor:
        ordered_q = store_and_order(self.q, self.k, self.v, self.slots, *self.kv[layer], self.position)
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        if order == "own first":
            with torch.cuda.stream(self.side):
                own = self.own(layer, splits)
            shared = self.prefix(layer, ordered_q, plan)
        else:
            with torch.cuda.stream(main if order == "serial" else self.side):
                shared = self.prefix(layer, ordered_q, plan)
            own = self.own(layer, splits)
        main.wait_stream(self.side)
        (shared, shared_lse), (own, own_lse) = shared, own
        return merge(shared, shared_lse, own, own_lse, self.position, self.shared_pages, own)

    def error(self, layer: int) -> float:
        """The largest difference from one FA3 call over the pages of both parts."""
        prefix_pages = self.load.prefix // PAGE
        starts = self.position.long() // self.members * prefix_pages
        table = (starts[:, None] + torch.arange(prefix_pages, device="cuda")).to(torch.int32)
        k, v = (x.unflatten(0, (-1, PAGE)) for x in self.kv[layer])
        whole = flash_attn_with_kvcache(
            q=self.q, k_cache=k, v_cache=v, page_table=torch.cat([table, self.own_table], 1),
            cache_seqlens=self.lens + self.load.prefix, cu_seqlens_q=self.each, max_seqlen_q=1, causal=True,
            softmax_scale=DIM**-0.5, ver=3,
        )  # fmt: skip
        ours = self.layer(layer, *(PLANS[0], ORDERS[2], 0))
        torch.cuda.synchronize()
        return float((ours.float() - whole.float()).abs().max())


def measure(load: Load, kv: list[KV]) -> Row:
    case = Case(load, kv)
    error, us = max(case.error(layer) for layer in (0, LAYERS // 2 + 1)), {}
    ordered = torch.randn_like(case.q.contiguous())

    def all_layers(call: Callable[..., Any], *args: Any) -> float:
        return us_a_layer(lambda: [call(layer, *args) for layer in range(LAYERS)], LAYERS)

    for plan in PLANS:
        us[f"prefix alone, {plan} plan"] = all_layers(case.prefix, ordered, plan)
    for splits in SPLITS:
        us[f"own alone, splits {splits}"] = all_layers(case.own, splits)
    for plan, order, splits in itertools.product(PLANS, ORDERS, SPLITS):
        us[f"{plan} plan, {order}, splits {splits}"] = all_layers(case.layer, plan, order, splits)
    return {"load": load.name, "us": us, "error": error}


def main() -> None:
    torch.manual_seed(0)
    memory = torch.empty(2, TOKENS, LAYERS // 2, 2, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    for part in memory.view(-1).split(1 << 28):
        part.normal_()
    half = LAYERS // 2
    kv = [(memory[i // half, :, i % half, 0], memory[i // half, :, i % half, 1]) for i in range(LAYERS)]
    results = ResultFile(RESULTS / "h200" / "probe_two_level.json", "probes.two_level", ["load"], device="cuda")
    for load in LOADS:
        results.add(measure(load, kv))


if __name__ == "__main__":
    main()
