# SPDX-License-Identifier: Apache-2.0
"""FA3 over K and V in several layouts, by pages of 128 and by rows: what the distance from token to token costs.

`layered`: K of a layer, token after token, then V. `N stripes`: all layers of a token together, in N parts that lie
apart, so that a layer's tokens are 128 / N KiB from each other. Microseconds a layer call; 32 layers in one graph for
decode, eight for extension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sgl_kernel.flash_attn import get_scheduler_metadata  # type: ignore[import-not-found]
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

from benchmarks.common import RESULTS, ResultFile, Row, median
from benchmarks.kernels_cuda import graph_times
from benchmarks.kernels_memory import DIM, HEADS, KV_HEADS, PAGE, int32

LAYERS = 32
TOKENS, LONGEST = 32 * 4608, 40960
STRIPES = (1, 2, 4, 8, 32)
DECODE = ((32, 4160), (64, 2048), (8, 16384))  # requests, tokens
EXTEND = (  # requests, new tokens, tokens with them
    (1, 8192, 8192), (1, 8192, 16384), (1, 8192, 24576), (1, 8192, 32768),
    (4, 512, 8704), (64, 64, 2112), (16, 64, 8256), (8, 1024, 1024),
)  # fmt: skip
EXTEND_LAYOUTS = ("layered", "1 stripe", "2 stripes")
KV = tuple[torch.Tensor, torch.Tensor]


def us_a_layer(call: Callable[[], Any], layers: int, rounds: int = 12) -> float:
    """Median microseconds a layer over the replays of the captured call, which covers ``layers`` layers."""
    return round(median(graph_times([call], rounds)) * 1e3 / layers, 2)


def layered(memory: torch.Tensor, layer: int) -> KV:
    k, v = memory.view(LAYERS, 2, TOKENS, KV_HEADS, DIM)[layer]
    return k, v


def striped(memory: torch.Tensor, layer: int, stripes: int) -> KV:
    each = LAYERS // stripes
    stripe = memory.view(stripes, TOKENS, each, 2, KV_HEADS, DIM)[layer // each]
    return stripe[:, layer % each, 0], stripe[:, layer % each, 1]


def call(kv: list[KV], args: dict[str, Any], rows: int = 0, row_tokens: int = 0) -> Callable[[], None]:
    """One FA3 call a layer; by rows if there are any, else by pages."""

    def shaped(x: torch.Tensor) -> torch.Tensor:
        return x[: rows * row_tokens].unflatten(0, (rows, -1)) if rows else x.unflatten(0, (-1, PAGE))

    views = [(shaped(k), shaped(v)) for k, v in kv]

    def run() -> None:
        for k, v in views:
            flash_attn_with_kvcache(k_cache=k, v_cache=v, causal=True, softmax_scale=DIM**-0.5, ver=3, **args)

    return run


def decode(layouts: dict[str, list[KV]], requests: int, tokens: int) -> Iterator[Row]:
    lens, bounds = int32([tokens] * requests), int32(range(requests + 1))
    row_tokens = TOKENS // requests // PAGE * PAGE
    order = torch.randperm(TOKENS // PAGE, device="cuda").to(torch.int32)
    table = torch.zeros(requests, LONGEST // PAGE, dtype=torch.int32, device="cuda")
    used = -(-tokens // PAGE)
    table[:, :used] = order[: requests * used].view(requests, used)
    for page in (PAGE, None):
        schedule = get_scheduler_metadata(
            batch_size=requests, max_seqlen_q=1, max_seqlen_k=LONGEST, num_heads=HEADS, num_heads_k=KV_HEADS,
            headdim=DIM, cache_seqlens=lens, cu_seqlens_q=bounds, page_size=page, causal=True,
        )  # fmt: skip
        args: dict[str, Any] = {
            "q": torch.randn(requests, HEADS, DIM, device="cuda", dtype=torch.bfloat16),
            "cache_seqlens": lens, "cu_seqlens_q": bounds, "max_seqlen_q": 1, "scheduler_metadata": schedule,
        }  # fmt: skip
        args |= {"page_table": table} if page else {"cache_batch_idx": int32(range(requests))}
        rows = (0, 0) if page else (requests, row_tokens)
        us = {name: us_a_layer(call(kv, args, *rows), LAYERS) for name, kv in layouts.items()}
        floor = round(requests * tokens * KV_HEADS * DIM * 4 / 4.5e6, 2)
        yield {"case": f"decode {requests} x {tokens}", "by": "pages" if page else "rows", "us": us, "floor_us": floor}


def extend(layouts: dict[str, list[KV]], requests: int, new: int, tokens: int) -> Iterator[Row]:
    row_tokens = (tokens + 256) // PAGE * PAGE
    used = -(-tokens // PAGE)
    order = torch.randperm(TOKENS // PAGE, device="cuda").to(torch.int32)
    args: dict[str, Any] = {
        "q": torch.randn(requests * new, HEADS, DIM, device="cuda", dtype=torch.bfloat16),
        "cache_seqlens": int32([tokens] * requests),
        "cu_seqlens_q": int32([i * new for i in range(requests + 1)]),
        "max_seqlen_q": new,
    }
    ways: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
        "pages": (args | {"page_table": order[: requests * used].view(requests, used).contiguous()}, (0, 0)),
        "rows": (args | {"cache_batch_idx": int32(range(requests))}, (requests, row_tokens)),
    }
    for by, (given, rows) in ways.items():
        us = {name: us_a_layer(call(layouts[name][:8], given, *rows), 8, rounds=6) for name in EXTEND_LAYOUTS}
        yield {"case": f"extend {requests} x {new} to {tokens}", "by": by, "us": us}


def main() -> None:
    torch.manual_seed(0)
    memory = torch.empty(TOKENS * LAYERS * 2 * KV_HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    for part in memory.split(1 << 28):
        part.normal_()
    layouts = {"layered": [layered(memory, layer) for layer in range(LAYERS)]}
    layouts |= {f"{n} stripe{'s' * (n > 1)}": [striped(memory, layer, n) for layer in range(LAYERS)] for n in STRIPES}
    results = ResultFile(RESULTS / "h200" / "probe_layout.json", "probes.layout", ["case", "by"], device="cuda")
    for requests, tokens in DECODE:
        for row in decode(layouts, requests, tokens):
            results.add(row)
    for requests, new, tokens in EXTEND:
        for row in extend(layouts, requests, new, tokens):
            results.add(row)


if __name__ == "__main__":
    main()
