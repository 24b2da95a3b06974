# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 2, the package flash-attn: rows by ``cache_batch_idx``."""

from __future__ import annotations

import torch

from sglang_vattn.attention.kernels.base import RowBatch, RowKernel


class FlashAttention2(RowKernel):
    """Reads no key past a row's length.

    Its call for caches takes the same number of queries of each request. So a batch of different extensions goes to
    the kernel a request at a time.
    """

    name = "fa2"
    package = "flash-attn"
    module = "flash_attn_2_cuda"

    def __init__(self) -> None:
        from flash_attn import flash_attn_with_kvcache

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
        def attend(part: torch.Tensor, index: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = self._attend(
                part, k_rows, v_rows, cache_seqlens=lengths, cache_batch_idx=index, softmax_scale=scale,
                softcap=softcap, causal=True, return_softmax_lse=True,
            )  # fmt: skip
            return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

        if batch.is_decode:
            return attend(q[:, None], batch.index, batch.lengths)
        parts = [
            attend(q[None, span.start : span.end], batch.index[i : i + 1], batch.lengths[i : i + 1])
            for i, span in enumerate(batch.spans)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
