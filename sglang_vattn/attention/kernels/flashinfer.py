# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged kernel, where a page is a whole row.

Its ragged form wants the requests' keys packed without gaps, and its single form one launch a request. In its paged
form the size of a page is a number like any other: with one page a request, that page being its row, the page table is
the row index.
"""

from __future__ import annotations

import torch

from sglang_vattn.attention.kernels.base import KernelMissing, RowBatch, RowKernel

WORKSPACE_BYTES = 256 << 20
LARGEST_STRIDE = 1 << 32  # elements from one page to the next: FlashInfer keeps it in 32 bits


class FlashInfer(RowKernel):
    """Reads no key past a row's length. Plans each batch on the host; compiles itself at its first call."""

    name = "flashinfer"
    package = "flashinfer-python"
    module = "flashinfer"
    capturable = False  # not without a wrapper a batch size, which SGLang's own FlashInfer backend has

    def __init__(self) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._planned: tuple[RowBatch, float, float] | None = None

    def check_rows(self, k_rows: torch.Tensor, v_rows: torch.Tensor) -> None:
        if k_rows.stride(0) >= LARGEST_STRIDE:
            raise KernelMissing(
                f"--vattn-kernel flashinfer: a row of {k_rows.shape[1]} tokens is too long for it: lower "
                f"--context-length to {k_rows.shape[1] * LARGEST_STRIDE // k_rows.stride(0)}"
            )

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
        if self._planned is None or self._planned[0] is not batch or self._planned[1:] != (scale, softcap):
            count = len(batch.index)
            self._wrapper.plan(
                batch.q_bounds,
                torch.arange(count + 1, dtype=torch.int32),
                batch.index,
                batch.lengths,
                q.shape[1],
                k_rows.shape[2],
                k_rows.shape[3],
                k_rows.shape[1],
                head_dim_vo=v_rows.shape[3],
                causal=True,
                sm_scale=scale,
                logits_soft_cap=softcap,
                q_data_type=q.dtype,
                kv_data_type=k_rows.dtype,
            )
            self._planned = batch, scale, softcap
        out, lse = self._wrapper.run(q, (k_rows, v_rows), return_lse=True, lse_base="ln")
        return out, lse
