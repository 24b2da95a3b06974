# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3, as SGLang's own kernel package has it: rows by ``cache_batch_idx``."""

from __future__ import annotations

import torch

from sglang_vattn.attention.kernels.base import KernelMissing, RowBatch, RowKernel


class FlashAttention3(RowKernel):
    """Loads whole tiles of keys, so it reads up to a tile past a row's length (``geometry.READ_AHEAD_TOKENS``)."""

    name = "fa3"
    package = "sglang-kernel"
    module = "sgl_kernel"
    kv_dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)

    def __init__(self) -> None:
        from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

        if torch.cuda.get_device_capability()[0] not in (8, 9):
            raise KernelMissing("--vattn-kernel fa3 needs a GPU of compute capability 8.x or 9.x")
        self._attend = flash_attn_with_kvcache

    def __call__(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        batch: RowBatch,
        *,
        scale: float,
        softcap: float = 0.0,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        need_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = self._attend(
            q=q.to(k_rows.dtype),  # fp8 keys want fp8 queries, as in SGLang's own backend
            k_cache=k_rows,
            v_cache=v_rows,
            cache_batch_idx=batch.index,
            cache_seqlens=batch.lengths,
            cu_seqlens_q=batch.q_bounds,
            max_seqlen_q=batch.longest_q,
            softmax_scale=scale,
            softcap=softcap,
            k_descale=_a_head(k_scale, k_rows, batch),
            v_descale=_a_head(v_scale, v_rows, batch),
            causal=True,
            return_softmax_lse=need_lse,
            ver=3,
        )
        return (result[0], result[1].T) if need_lse else (result, None)


def _a_head(scale: torch.Tensor | None, rows: torch.Tensor, batch: RowBatch) -> torch.Tensor | None:
    return None if scale is None else scale.expand(len(batch.index), rows.shape[2])
