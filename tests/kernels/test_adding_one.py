# SPDX-License-Identifier: Apache-2.0
"""docs/kernels.md shows how to add a kernel: in under 50 lines, and right. tests/serving/test_models.py serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_vattn.attention.kernels import load, refusal
from tests.kernels.cases import NEW_TOKENS, Shape, check, open_rows
from tests.kernels.document import NAME, shown_kernel, write_shown_kernel


def test_it_is_short(root: Path) -> None:
    assert len(shown_kernel(root).splitlines()) < 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_right(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    write_shown_kernel(root, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    kernel = load(NAME, "cpu", dtype)
    with open_rows("cpu", Shape(4, 2, 32), dtype) as rows:
        for kind in NEW_TOKENS:
            check(kernel, rows, kind)


def test_what_it_does_not_say_it_can_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shown_kernel(root, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert "--kv-cache-dtype" in str(refusal(NAME, device="cpu", kv_dtype=torch.float8_e4m3fn))
    assert "--disable-decode-cuda-graph" in str(refusal(NAME, device="cuda", graphs=True))
