# SPDX-License-Identifier: Apache-2.0
"""Shared-prefix decode with FlashAttention 3: each group's prefix once, each request's own part, merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

from sglang_vattn.attention.forwards import store
from sglang_vattn.attention.groups import GroupBuffers
from sglang_vattn.attention.two_level import merge, store_and_order

if TYPE_CHECKING:
    from sglang_vattn.attention.fa3 import Fa3RowBackend


class SharedDecode:
    """The decode attention of a captured graph whose batch has groups (design.md, 'Shared-prefix decode')."""

    def __init__(self, backend: Fa3RowBackend) -> None:
        self.backend, self.pool = backend, backend.pool
        self._buffers: dict[int, GroupBuffers] = {}  # by graph size
        self._side_stream = torch.cuda.Stream()

    def buffers(self, batch: int) -> GroupBuffers:
        """The buffers of the graph for this batch size."""
        if batch not in self._buffers:
            self._buffers[batch] = GroupBuffers(batch, self.pool.page_size, self.backend.device)
        return self._buffers[batch]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """Store this step's K and V, attend; q and the result are (batch, heads * dim)."""
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        ordered_q = self._store_and_order(q, k, v, layer, forward_batch, save_kv_cache)
        groups, index = self.backend.groups, layer.layer_id - self.pool.start_layer
        assert groups is not None
        common = {"softmax_scale": layer.scaling, "softcap": layer.logit_cap, "return_softmax_lse": True, "ver": 3}
        # Two branches of the captured graph. The short call goes first: the long one fills the processors behind it.
        main, side = torch.cuda.current_stream(), self._side_stream
        side.wait_stream(main)
        with torch.cuda.stream(side):
            own, own_lse = self._own(q, layer, common)
        ordered_q, scales = self.backend.query(ordered_q, layer, groups.room)
        # FA3 plans this call itself, 4 us a layer. A plan made once for all layers (`get_scheduler_metadata`) takes
        # too few splits for groups: 98 us instead of 30 (docs/benchmarks.md, 'Two-level decode').
        shared, shared_lse, *_ = flash_attn_with_kvcache(
            q=ordered_q,
            k_cache=self.pool.k_rows[index],
            v_cache=self.pool.v_rows[index],
            cache_batch_idx=groups.rows,
            cache_seqlens=groups.prefix_tokens,
            cu_seqlens_q=groups.bounds,
            max_seqlen_q=len(groups.order),
            causal=False,
            **scales,
            **common,
        )
        main.wait_stream(side)
        buffer = getattr(forward_batch, "_attn_output", None)
        out = own if buffer is None else buffer.view(own.shape)
        merge(shared, shared_lse, own, own_lse, groups.position, groups.shared_pages, out)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _own(self, q: torch.Tensor, layer: Any, common: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """What each request reads for itself alone, by pages: 128 tokens a tile, where rows would take 176."""
        metadata = self.backend.forward_metadata
        k_pages, v_pages = self.backend.get_paged_mha_kv_cache(layer)
        q, scales = self.backend.query(q, layer, len(q))
        out, lse, *_ = flash_attn_with_kvcache(
            q=q,
            k_cache=k_pages,
            v_cache=v_pages,
            page_table=metadata.page_table,
            cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=1,
            causal=True,
            num_splits=self.backend.num_splits,
            scheduler_metadata=metadata.scheduler_metadata,
            **scales,
            **common,
        )
        return out, lse

    def _store_and_order(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """(batch, heads, dim): the queries in the order of the groups; K and V go to their home slots."""
        groups, pool = self.backend.groups, self.pool
        assert groups is not None
        if (
            not save_kv_cache
            or k is None
            or v is None
            or k.dtype != pool.store_dtype
            or not all(each[0].is_contiguous() for each in (q, k, v))
        ):
            store(pool, k, v, layer, forward_batch, save_kv_cache)
            return q.index_select(0, groups.order)
        index = layer.layer_id - pool.start_layer
        slots = forward_batch.out_cache_loc
        return store_and_order(q, k, v, slots, pool.k_buffer[index], pool.v_buffer[index], groups.position)
