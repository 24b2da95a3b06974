# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 4, the package flash-attn-4 (CuTe DSL), on Hopper: rows as one long sequence of tokens."""

from __future__ import annotations

import torch

from sglang_vattn.attention.kernels.base import KernelMissing, RowBatch, RowKernel


class FlashAttention4(RowKernel):
    """Loads whole tiles of keys, of up to 144 tokens (``_tile_size_fwd_sm90`` in flash_attn/cute/interface.py).

    Compiles itself at the first call for each head dimension.
    """

    name = "fa4"
    package = "flash-attn-4"
    module = "flash_attn.cute"

    def __init__(self) -> None:
        from flash_attn.cute.interface import flash_attn_varlen_func

        if torch.cuda.get_device_capability()[0] < 9:
            raise KernelMissing("--vattn-kernel fa4 needs a GPU of compute capability 9.0 or more")
        self._attend = flash_attn_varlen_func

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
            q,
            k_rows.flatten(0, 1),
            v_rows.flatten(0, 1),
            cu_seqlens_q=batch.q_bounds,
            cu_seqlens_k=batch.begins(k_rows.shape[1]),
            seqused_k=batch.lengths,
            max_seqlen_q=batch.longest_q,
            max_seqlen_k=batch.longest,
            softmax_scale=scale,
            softcap=softcap,
            causal=True,
            return_lse=need_lse,
        )
        return result[0], result[1].T if need_lse else None
