# SPDX-License-Identifier: Apache-2.0
"""The FlashAttention 2 that torch brings (``torch.nn.attention.varlen``): rows as one long sequence of tokens."""

from __future__ import annotations

from inspect import signature

import torch

from sglang_vattn.attention.kernels.base import KernelMissing, RowBatch, RowKernel


class TorchVarlen(RowKernel):
    """Reads no key past a row's length. Nothing to install or to compile."""

    name = "torch"
    package = "torch"
    module = "torch"
    softcap = False

    def __init__(self) -> None:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        if not {"enable_gqa", "seqused_k"} <= signature(varlen_attn).parameters.keys():
            raise KernelMissing("--vattn-kernel torch needs a newer torch, whose varlen_attn knows grouped queries")
        try:  # varlen_attn asks at its first call, and raises at that one only
            torch.backends.cudnn.version()
        except RuntimeError as error:
            raise KernelMissing(
                f"--vattn-kernel torch: torch refuses this machine's cuDNN ({str(error).split('. ')[0]}): let "
                "LD_LIBRARY_PATH lead to the one that torch brings, or use --vattn-kernel auto"
            ) from error
        self._attend, self._aux = varlen_attn, AuxRequest(lse=True)

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
        out, lse = self._attend(
            q,
            k_rows.flatten(0, 1),
            v_rows.flatten(0, 1),
            batch.q_bounds,
            batch.begins(k_rows.shape[1]),
            batch.longest_q,
            batch.longest,
            return_aux=self._aux,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=batch.lengths,
        )
        return out, lse.T
