# SPDX-License-Identifier: Apache-2.0
"""The kernels that run on the host, over the shared cases; and that those cases tell wrong kernels from right ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_vattn.attention.kernels import KERNELS, KernelMissing, RowBatch, kernel_class, load, refusal
from sglang_vattn.attention.kernels.sdpa import Sdpa
from tests.kernels.cases import LLAMA, NEW_TOKENS, QWEN, Rows, Shape, check, open_rows

SMALL = Shape(4, 2, 32)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module", params=[(SMALL, dtype) for dtype in DTYPES] + [(QWEN, torch.float32)], ids=str)
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    with open_rows("cpu", *request.param) as opened:
        yield opened


@pytest.mark.parametrize("kind", NEW_TOKENS)
@pytest.mark.parametrize("name", [name for name in KERNELS if "cpu" in kernel_class(name).devices])
def test_right_at_every_corner(name: str, rows: Rows, kind: str) -> None:
    check(load(name, "cpu", rows.dtype), rows, kind)


class Shifted(Sdpa):
    """Sees this many keys more or fewer than there are."""

    shift = 0

    def __call__(self, q: Any, k_rows: Any, v_rows: Any, batch: RowBatch, **kw: Any) -> Any:
        lengths = (batch.lengths + self.shift).clamp(min=1)
        return super().__call__(
            q, k_rows, v_rows, RowBatch(batch.index, lengths, batch.q_bounds, batch.longest_q, batch.longest), **kw
        )


class NoMask(Sdpa):
    def __call__(self, q: Any, k_rows: Any, v_rows: Any, batch: RowBatch, **kw: Any) -> Any:
        out, lse = super().__call__(q, k_rows, v_rows, batch, **kw)
        for start, end, row, length in batch.spans:
            k, v = k_rows[row, :length].to(q.dtype), v_rows[row, :length].to(q.dtype)
            scores = torch.einsum("nhgd,lhd->nhgl", q[start:end].unflatten(1, (k.shape[1], -1)), k) * kw["scale"]
            out[start:end] = torch.einsum("nhgl,lhd->nhgd", scores.softmax(-1), v).flatten(1, 2)
        return out, lse


class OneRow(Sdpa):
    """Reads every request in the row of the longest."""

    def __call__(self, q: Any, k_rows: Any, v_rows: Any, batch: RowBatch, **kw: Any) -> Any:
        index = batch.index[batch.lengths.argmax()].expand(len(batch.index))
        return super().__call__(
            q, k_rows, v_rows, RowBatch(index, batch.lengths, batch.q_bounds, batch.longest_q, batch.longest), **kw
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cases_tell_a_wrong_kernel(dtype: torch.dtype) -> None:
    with open_rows("cpu", SMALL, dtype) as rows:
        for shift in (-1, 1):
            for kind in NEW_TOKENS:
                wrong = Shifted()
                wrong.shift = shift
                with pytest.raises(AssertionError, match="off by"):
                    check(wrong, rows, kind)
        with pytest.raises(AssertionError, match="off by"):
            check(NoMask(), rows, "prefill")
        with pytest.raises(AssertionError, match="off by"):
            check(OneRow(), rows, "decode")


def test_a_kernel_that_is_missing_names_the_package() -> None:
    for name in KERNELS:
        if "cpu" not in kernel_class(name).devices:
            assert "--vattn-kernel" in str(refusal(name, device="cpu"))
    for name, package in (("fa2", "flash-attn"), ("fa4", "flash-attn-4"), ("flashinfer", "flashinfer-python")):
        assert f"pip install {package}," in str(refusal(name, device="cuda"))  # none is in this environment
        with pytest.raises(KernelMissing, match=f"pip install {package},"):
            load(name, "cuda")


def test_what_a_kernel_cannot_do_is_refused() -> None:
    assert refusal("sdpa", device="cpu", kv_dtype=torch.float8_e5m2) is None
    assert "--disable-decode-cuda-graph" in str(refusal("sdpa", device="cuda", graphs=True))
    assert "--kv-cache-dtype" in str(refusal("torch", device="cuda", kv_dtype=torch.float8_e4m3fn))
    for unknown in ("fa5", "no.such.module:Kernel", "torch:Tensor", "sglang_vattn.attention.kernels.base:Nothing"):
        assert str(refusal(unknown, device="cpu")).startswith(f"--vattn-kernel {unknown}")


def test_the_llama_shape_in_float32() -> None:
    with open_rows("cpu", LLAMA, torch.float32) as rows:
        check(load("sdpa", "cpu"), rows, "decode")


def test_a_cudnn_that_torch_refuses_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 24, 0). And more")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    with pytest.raises(KernelMissing, match=r"9, 24, 0\)\): let LD_LIBRARY_PATH .* or use --vattn-kernel auto"):
        kernel_class("torch")()  # type: ignore[abstract]
