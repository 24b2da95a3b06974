# SPDX-License-Identifier: Apache-2.0
"""Shared-prefix decode with FlashAttention 3: each group's prefix once, each request's own part, merged."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

from sglang_vattn.attention.groups import GroupBuffers
from sglang_vattn.attention.two_level import merge, store_and_order
from sglang_vattn.sharing import Group

if TYPE_CHECKING:
    from sglang_vattn.attention.fa3 import Fa3RowBackend


TUNE = os.environ.get("VATTN_TUNE", "1 prefix_side").split()


class SharedDecode:
    """The decode attention of a captured graph whose batch has groups (design.md, 'Shared-prefix decode')."""

    def __init__(self, backend: Fa3RowBackend) -> None:
        self.backend, self.pool = backend, backend.pool
        self._buffers: dict[int, GroupBuffers] = {}  # by graph size
        self._side_stream = torch.cuda.Stream()

    def buffers(self, batch: int) -> GroupBuffers:
        """The buffers of the graph for this batch size."""
        if batch not in self._buffers:
            groups = self._buffers[batch] = GroupBuffers(batch, self.pool.page_size, self.backend.device)
            groups.schedule = self._schedule(groups)
        return self._buffers[batch]

    def update(self, buffers: GroupBuffers, groups: list[Group], version: int) -> None:
        """Before a replay, on its stream: the graph reads these groups from now on."""
        if buffers.update(groups, version) and buffers.schedule is not None:
            buffers.schedule.copy_(self._schedule(buffers))

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
        # Both calls wait more than they read, so they run side by side (branches, in the captured graph).
        main, side = torch.cuda.current_stream(), self._side_stream
        side.wait_stream(main)
        own_first = TUNE[1] == "own_side"
        if own_first:
            with torch.cuda.stream(side):
                own, own_lse = self._own(q, layer, common)
        with torch.cuda.stream(main if own_first or TUNE[1] == "serial" else side):
            ordered_q, scales = self.backend.query(ordered_q, layer, groups.room)
            shared, shared_lse, *_ = flash_attn_with_kvcache(
                q=ordered_q,
                k_cache=self.pool.k_rows[index],
                v_cache=self.pool.v_rows[index],
                cache_batch_idx=groups.rows,
                cache_seqlens=groups.prefix_tokens,
                cu_seqlens_q=groups.bounds,
                max_seqlen_q=len(groups.order),
                causal=False,
                scheduler_metadata=groups.schedule,
                **scales,
                **common,
            )
        if not own_first:
            own, own_lse = self._own(q, layer, common)
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
        plain = save_kv_cache and k is not None and v is not None and k.dtype == pool.store_dtype
        if not plain or not (q[0].is_contiguous() and k[0].is_contiguous() and v[0].is_contiguous()):
            self.backend.store(k, v, layer, forward_batch, save_kv_cache)
            return q.index_select(0, groups.order)
        index = layer.layer_id - pool.start_layer
        slots = forward_batch.out_cache_loc
        return store_and_order(q, k, v, slots, pool.k_buffer[index], pool.v_buffer[index], groups.position)

    def _schedule(self, groups: GroupBuffers) -> torch.Tensor | None:
        """FA3's plan for the prefix call: made when the groups change, where FA3 alone would make it every layer."""
        backend = self.backend
        if TUNE[0] == "0" or backend._get_scheduler_metadata is None or backend._disable_scheduler_metadata_precompute:
            return None
        schedule: torch.Tensor = backend._get_scheduler_metadata(
            batch_size=groups.room,
            max_seqlen_q=len(groups.order),
            max_seqlen_k=self.pool.row_tokens,
            num_heads=backend.num_attention_heads,
            num_heads_k=backend.num_kv_heads,
            headdim=backend.head_dim,
            cache_seqlens=groups.prefix_tokens,
            qkv_dtype=backend.kv_cache_dtype,
            cu_seqlens_q=groups.bounds,
            page_size=None,
            causal=False,
            has_softcap=backend.has_softcap,
        )
        return schedule
