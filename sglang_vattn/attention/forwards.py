# SPDX-License-Identifier: Apache-2.0
"""What every backend that reads rows on CUDA asks of a forward: may it, where its queries begin, where K and V go."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_vattn.pool import VattnPool


def is_plain(forward_batch: Any) -> bool:
    """Decode or extension, without speculation."""
    mode = forward_batch.forward_mode
    return forward_batch.spec_info is None and (mode.is_decode() or mode.is_extend_without_speculative())


def query_bounds(forward_batch: Any) -> tuple[torch.Tensor, int]:
    """Where each request's queries begin, int32 (batch + 1,), and the most that one has; of a plain forward."""
    if forward_batch.forward_mode.is_decode():
        device = forward_batch.seq_lens.device
        return torch.arange(forward_batch.batch_size + 1, dtype=torch.int32, device=device), 1
    ends = torch.cumsum(forward_batch.extend_seq_lens, dim=0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0)), max(forward_batch.extend_seq_lens_cpu)


def windowed(layer: Any) -> bool:
    """Whether the layer's attention sees a window only."""
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


def store(
    pool: VattnPool,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool,
) -> None:
    """Write this step's K and V by home slot; a launch of its own, so that rows see it (design.md, Mapping 6)."""
    if k is not None and save_kv_cache:
        location = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=None)
        pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
