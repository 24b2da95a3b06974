# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 on rows: SGLang's FA3 backend, reading each request's row instead of a page table.

A decode batch runs as one of the captured graph variants (see :class:`RowGraphVariants`); prefill and eager
decode choose per batch. What rows do not serve goes to SGLang's own code, by page table over home slots.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache
from sglang.srt.layers.attention.flashattention_backend import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
    normal_decode_set_metadata,
)
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.attention.fa3_shared import SharedDecode
from sglang_vattn.attention.forwards import is_plain, query_bounds, store, windowed
from sglang_vattn.attention.groups import GroupBuffers
from sglang_vattn.attention.two_level import own_part
from sglang_vattn.attention.variants import ROWS, SHARED
from sglang_vattn.pool import VattnPool


class Fa3RowBackend(FlashAttentionBackend):
    """FA3 without a page table where the batch's rows are mapped.

    ``row_index`` is int32 (batch,): the row of each request of the running forward, or None when it reads
    pages. Padding lanes of a captured graph have request slot 0, which leads to row 0, the dummy row.
    ``groups`` holds the device side of the batch's groups while it reads common prefixes once, else None.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
        assert isinstance(pool, VattnPool) and isinstance(allocator, VattnAllocator)
        self.pool, self.allocator = pool, allocator
        self.row_index: torch.Tensor | None = None
        self.groups: GroupBuffers | None = None
        self._graph_row_index: torch.Tensor | None = None
        self.shared = SharedDecode(self)
        # Features of the model whose attention rows do not serve; then every batch reads pages.
        self._model_fits = not (
            self.is_encoder_decoder
            or self.use_sliding_window_kv_pool
            or self.local_attn_builder is not None
            or self.is_prefill_aware_swa
            or self.fa_skip_kv_cache
            or self.attn_cp_size > 1
        )
        # A captured graph of groups has no other way to read, so every layer must be able to; and the merge takes heads
        # of a power of two.
        windows = runner.sliding_window_size not in (None, -1)
        whole = not windows and self.head_dim & (self.head_dim - 1) == 0
        allocator.reading.rows_possible = self._model_fits
        allocator.reading.share_possible = self._model_fits and whole
        allocator.reading.pages_as_fast = True

    # ------------------------------------------------------------------ metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager decode, and prefill with or without graphs around its layers."""
        self.groups = None  # only captured graphs read by groups
        if not (is_plain(forward_batch) and self._model_fits and self.allocator.reading.by_rows):
            self.row_index = None
            super().init_forward_metadata(forward_batch)
            return
        lengths = forward_batch.seq_lens
        longest = int(forward_batch.seq_lens_cpu.max())
        metadata = FlashAttentionMetadata()
        metadata.cache_seqlens_int32 = lengths.to(torch.int32)
        metadata.max_seq_len_k = longest
        self.row_index = self.allocator.rows.table[forward_batch.req_pool_indices]
        metadata.cu_seqlens_q, metadata.max_seq_len_q = query_bounds(forward_batch)
        if forward_batch.forward_mode.is_decode():
            metadata.scheduler_metadata = self._compute_scheduler_metadata(
                forward_batch.batch_size, longest, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
            )
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._graph_row_index = torch.zeros(max_bs, dtype=torch.int32, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        reading, batch = self.allocator.reading, forward_batch.batch_size
        variant = get_capture_attention_variant() if in_capture else reading.variant
        if not forward_batch.forward_mode.is_decode_or_idle():
            variant = None
        assert self._graph_row_index is not None
        self.row_index = self._graph_row_index[:batch] if variant == ROWS else None
        self.groups = None
        if variant == SHARED:
            self.groups = self.shared.buffers(batch)
            if not in_capture:
                self.groups.update(reading.groups, reading.groups_version)
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def _set_decode_page_metadata(
        self, plan: Any, metadata: Any, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_len_delta: int
    ) -> None:
        """SGLang fills a decode graph's lengths and page table here; rows need their index instead of the table."""
        if self.groups is not None:
            own_part(
                self.req_to_token, req_pool_indices, seq_lens, self.groups.shared_pages, self.pool.page_size,
                page_table=metadata.page_table, own_lens=metadata.cache_seqlens_int32,
            )  # fmt: skip
            return
        if self.row_index is None:
            super()._set_decode_page_metadata(plan, metadata, req_pool_indices, seq_lens, seq_len_delta)
            return
        normal_decode_set_metadata(
            metadata.cache_seqlens_int32,
            metadata.cu_seqlens_k,
            metadata.page_table,
            self.req_to_token,
            req_pool_indices,
            self.max_num_pages,
            seq_lens,
            seq_len_delta,
            self.page_size,
            metadata.swa_page_table,
            skip_page_table=True,
        )
        torch.index_select(self.allocator.rows.table, 0, req_pool_indices, out=self.row_index)

    def _compute_scheduler_metadata(
        self, batch_size: int, max_seq_len_k: int, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor
    ) -> torch.Tensor | None:
        if self.row_index is None:
            return super()._compute_scheduler_metadata(batch_size, max_seq_len_k, cache_seqlens, cu_seqlens_q)
        page_size: int = self.pool.page_size
        self.page_size = None  # the schedule of a kernel without a page table
        try:
            return super()._compute_scheduler_metadata(batch_size, max_seq_len_k, cache_seqlens, cu_seqlens_q)
        finally:
            self.page_size = page_size

    # ------------------------------------------------------------------ forward

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        **kw: Any,
    ) -> Any:
        if self.row_index is None:
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, return_lse=return_lse, **kw
            )
        store(self.pool, k, v, layer, forward_batch, save_kv_cache)
        return self._read_rows(q, layer, forward_batch, return_lse, **kw)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        **kw: Any,
    ) -> Any:
        two_level = self.groups is not None and not windowed(layer) and not return_lse and kw.get("sinks") is None
        if self.row_index is None and not two_level:
            assert self.groups is None, "a layer that cannot read by groups in a graph that does"
            return super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, return_lse=return_lse, **kw
            )
        if two_level:
            return self.shared.forward(q, k, v, layer, forward_batch, save_kv_cache)
        store(self.pool, k, v, layer, forward_batch, save_kv_cache)
        return self._read_rows(q, layer, forward_batch, return_lse, **kw)

    def query(self, q: torch.Tensor, layer: Any, sequences: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The query in the dtype of the KV cache, and the scales of fp8 keys and values, (sequences, kv_heads)."""
        q, _, _, k_descale, v_descale = self.prepare_paged_mha_query(
            q, None, None, layer, logical_batch_size=sequences, kv_head_num=layer.tp_k_head_num, is_prefill=False
        )
        return q, {} if k_descale is None else {"k_descale": k_descale, "v_descale": v_descale}

    def _read_rows(
        self, q: torch.Tensor, layer: Any, forward_batch: Any, return_lse: bool, sinks: Any = None, **unused: Any
    ) -> Any:
        """The attention of one layer over rows; (tokens, heads * v_dim), with the log-sum-exp if asked for."""
        metadata = self.forward_metadata
        in_window = windowed(layer)
        causal = layer.attn_type not in (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)
        window = (layer.sliding_window_size, 0 if causal else layer.sliding_window_size) if in_window else (-1, -1)
        index = layer.layer_id - self.pool.start_layer
        buffer = getattr(forward_batch, "_attn_output", None)
        kwargs = {} if sinks is None else {"sinks": sinks}
        assert self.row_index is not None
        q, scales = self.query(q.reshape(-1, layer.tp_q_head_num, layer.head_dim), layer, len(self.row_index))
        result = flash_attn_with_kvcache(
            q=q,
            k_cache=self.pool.k_rows[index],
            v_cache=self.pool.v_rows[index],
            cache_batch_idx=self.row_index,
            cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seq_len_q,
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=window,
            softcap=layer.logit_cap,
            num_splits=self.num_splits,
            return_softmax_lse=return_lse,
            out=None if buffer is None else buffer.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            scheduler_metadata=None if in_window else metadata.scheduler_metadata,
            ver=self.fa_impl_ver,
            **scales,
            **kwargs,
        )
        out = result[0] if return_lse else result
        out = out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        return (out, result[1].T.contiguous()) if return_lse else out
