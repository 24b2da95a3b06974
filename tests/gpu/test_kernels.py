# SPDX-License-Identifier: Apache-2.0
"""Every kernel for rows over the shared cases on the GPU. One that this machine lacks is refused, with its package.

    python -m pytest -s --noconftest -o pythonpath= -o addopts= tests/gpu/test_kernels.py [-k fa3]

Prints what each kernel was tried on. FlashInfer and FlashAttention 4 compile themselves first, a minute or so.
"""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

import pytest
import torch

from sglang_vattn.attention.kernels import KERNELS, KernelMissing, RowBatch, RowKernel, kernel_class, load, refusal
from sglang_vattn.attention.kernels.sdpa import Sdpa
from tests.kernels.cases import GEMMA, LLAMA, NEW_TOKENS, PHI, QWEN, Shape, check, open_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Case(NamedTuple):
    kernel: str
    shape: Shape
    dtype: torch.dtype
    softcap: float = 0.0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel}-{self.shape.dim}-{dtype}" + ("-softcap" if self.softcap else "")


SHAPES = (LLAMA, QWEN, GEMMA, PHI)
CASES = [
    *(Case("fa3", shape, dtype) for shape in SHAPES for dtype in (BF16, E4M3)),
    Case("fa3", LLAMA, FP16),
    Case("fa3", GEMMA, BF16, softcap=30.0),
    *(Case("fa2", shape, BF16) for shape in SHAPES),
    *(Case("fa4", shape, BF16) for shape in (LLAMA, GEMMA)),
    Case("flashinfer", LLAMA, BF16),
    *(Case("sdpa", shape, BF16) for shape in SHAPES),
    *(Case("sdpa", LLAMA, dtype) for dtype in (FP32, E4M3, E5M2)),
    *(Case("torch", shape, BF16) for shape in SHAPES),
    Case("torch", LLAMA, FP16),
]


def test_every_kernel_has_cases() -> None:
    assert {case.kernel for case in CASES} == set(KERNELS)


@cache
def cudnn_refusal() -> str | None:
    """Why `torch` is refused on a machine whose cuDNN is older than the one that torch was built with."""
    try:
        kernel_class("torch")()
    except KernelMissing as error:
        return str(error)
    return None


def available(name: str, dtype: torch.dtype) -> RowKernel | None:
    """The kernel; None where it is refused, and that for its absence alone, or that of what it stands on."""
    if name == "torch" and (reason := cudnn_refusal()):
        assert "cuDNN" in reason
        print(f"\nrefused: {reason}")
        return None
    if reason := refusal(name, device="cuda", kv_dtype=dtype):
        found = kernel_class(name)
        print(f"\nrefused: {reason}")
        assert f"pip install {found.package}," in reason
        with pytest.raises(ImportError):
            found()
        return None
    return load(name, "cuda", dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right_at_every_corner(case: Case) -> None:
    kernel = available(case.kernel, case.dtype)
    if kernel is None:
        return
    began = time.monotonic()
    with open_rows("cuda", case.shape, case.dtype) as rows:
        for kind in NEW_TOKENS:
            check(kernel, rows, kind, softcap=case.softcap)
    print(f"\n{case}: right at every corner, {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("name", [name for name in KERNELS if kernel_class(name).capturable])
def test_a_captured_graph_follows_rows_and_lengths(name: str) -> None:
    """One capture, replayed with other rows and lengths in the same buffers."""
    kernel = available(name, BF16)
    if kernel is None:
        return
    with open_rows("cuda", LLAMA, BF16) as rows:
        everyone = list(range(len(rows.lengths)))
        first = rows.batch(everyone, NEW_TOKENS["decode"])
        batch = RowBatch(first.index, first.lengths, first.q_bounds, 1, rows.layers[0][0].shape[1])
        q = torch.randn(len(everyone), LLAMA.q_heads, LLAMA.dim, device="cuda", dtype=BF16)
        k_rows, v_rows = rows.layers[0]

        def attend() -> torch.Tensor:
            return kernel(q, k_rows, v_rows, batch, scale=LLAMA.dim**-0.5)[0]

        attend()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend()
        for order in (everyone[::-1], everyone[7:] + everyone[:7]):
            other = rows.batch(order, NEW_TOKENS["decode"])
            batch.index.copy_(other.index)
            batch.lengths.copy_(other.lengths)
            q.normal_()
            graph.replay()
            right, _ = Sdpa()(q, k_rows, v_rows, other, scale=LLAMA.dim**-0.5)
            torch.testing.assert_close(out, right, atol=3e-2, rtol=3e-2)
