# SPDX-License-Identifier: Apache-2.0
"""Any of SGLang's CUDA attention backends, with a kernel of ``--vattn-kernel`` where a batch's rows are mapped."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.attention.forwards import is_plain, query_bounds, store, windowed
from sglang_vattn.attention.kernels import RowBatch, RowKernel
from sglang_vattn.attention.variants import ROWS
from sglang_vattn.pool import VattnPool


class KernelRows:
    """What :func:`read_rows_with` mixes into SGLang's backend.

    A batch whose rows are not mapped, and a layer that the kernel does not serve (windows, sinks, a soft cap that it
    lacks), is the backend's own business, by home slots.

    Attributes
    ----------
    batch : RowBatch or None
        The rows of the running forward, or None while it reads pages.
    """

    def attach(self, kernel: RowKernel, runner: Any) -> None:
        pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
        assert isinstance(pool, VattnPool) and isinstance(allocator, VattnAllocator)
        self.kernel, self.pool, self.allocator = kernel, pool, allocator
        kernel.check_rows(pool.k_rows[0], pool.v_rows[0])
        self.batch: RowBatch | None = None
        self._graph_index: torch.Tensor | None = None  # int32 (largest batch,), which captured graphs read
        self._graph_lengths: torch.Tensor | None = None
        allocator.reading.rows_possible = True
        allocator.reading.share_possible = False

    # ------------------------------------------------------------------ metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]  # of SGLang's backend
        self.batch = self._batch_of(forward_batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(self, metadata: Any, batch: Any, **kw: Any) -> None:
        super().prepare_forward_metadata_for_breakable_cuda_graph_replay(metadata, batch, **kw)  # type: ignore[misc]
        self.batch = self._batch_of(batch)

    def _batch_of(self, forward_batch: Any) -> RowBatch | None:
        """The rows of an eager forward."""
        if not (is_plain(forward_batch) and self.allocator.reading.by_rows):
            return None
        bounds, longest_q = query_bounds(forward_batch)
        return self._planned(
            RowBatch(
                self.allocator.rows.table[forward_batch.req_pool_indices],
                forward_batch.seq_lens.to(torch.int32),
                bounds,
                longest_q,
                int(forward_batch.seq_lens_cpu.max()),
            )
        )

    def _planned(self, batch: RowBatch) -> RowBatch:
        self.kernel.plan(batch)
        return batch

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)  # type: ignore[misc]
        self._graph_index = torch.zeros(max_bs, dtype=torch.int32, device=self.pool.device)
        self._graph_lengths = torch.ones_like(self._graph_index)
        self._graph_bounds = torch.arange(max_bs + 1, dtype=torch.int32, device=self.pool.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)  # type: ignore[misc]
        variant = get_capture_attention_variant() if in_capture else self.allocator.reading.variant
        self.batch = None
        if variant != ROWS or self._graph_index is None or not forward_batch.forward_mode.is_decode_or_idle():
            return
        count = forward_batch.batch_size
        index, lengths = self._graph_index[:count], self._graph_lengths[:count]  # type: ignore[index]
        torch.index_select(self.allocator.rows.table, 0, forward_batch.req_pool_indices[:count], out=index)
        lengths.copy_(forward_batch.seq_lens[:count])
        self.batch = self._planned(RowBatch(index, lengths, self._graph_bounds[: count + 1], 1, self.pool.row_tokens))

    # ------------------------------------------------------------------ forward

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *a: Any, **kw: Any) -> Any:
        if not self._serves(layer, kw):
            return super().forward_extend(q, k, v, layer, forward_batch, *a, **kw)  # type: ignore[misc]
        return self._read_rows(q, k, v, layer, forward_batch, *a, **kw)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *a: Any, **kw: Any) -> Any:
        if not self._serves(layer, kw):
            return super().forward_decode(q, k, v, layer, forward_batch, *a, **kw)  # type: ignore[misc]
        return self._read_rows(q, k, v, layer, forward_batch, *a, **kw)

    def _serves(self, layer: Any, kw: dict[str, Any]) -> bool:
        plain = not layer.is_cross_attention and layer.attn_type.value == "decoder" and kw.get("sinks") is None
        return self.batch is not None and plain and not windowed(layer) and (self.kernel.softcap or not layer.logit_cap)

    def _read_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        **unused: Any,
    ) -> Any:
        """Write K and V by home slot, then read them in rows: two launches (design.md, Mapping 6)."""
        assert self.batch is not None
        store(self.pool, k, v, layer, forward_batch, save_kv_cache)
        index = layer.layer_id - self.pool.start_layer
        fp8 = self.pool.dtype.itemsize == 1
        out, lse = self.kernel(
            q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim),
            self.pool.k_rows[index],
            self.pool.v_rows[index],
            self.batch,
            scale=layer.scaling,
            softcap=layer.logit_cap or 0.0,
            k_scale=layer.k_scale if fp8 else None,
            v_scale=layer.v_scale if fp8 else None,
            need_lse=return_lse,
        )
        out = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return (out, lse) if return_lse else out


def read_rows_with(kernel: RowKernel, backend: Any, runner: Any) -> Any:
    """``backend``, reading rows with ``kernel`` from now on: an instance of a subclass, over the same attributes.

    Elsewhere a wrapper would do. But SGLang reads more than twenty attributes of a backend's class, and would get the
    defaults from a wrapper.
    """
    stock = type(backend)
    ours: Any = type(f"{stock.__name__}WithRows", (KernelRows, stock), {})
    rows = ours.__new__(ours)
    rows.__dict__ = backend.__dict__
    rows.attach(kernel, runner)
    return rows
