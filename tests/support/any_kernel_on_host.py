# SPDX-License-Identifier: Apache-2.0
"""Lets the backend for any kernel, which serves on CUDA, serve on the host: over SGLang's torch_native."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """For this process and those that it forks."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_vattn.attention import host
    from sglang_vattn.attention.any_kernel import read_rows_with

    def build(runner: Any, kernel: Any) -> Any:
        return read_rows_with(kernel, TorchNativeAttnBackend(runner), runner)

    host.HostRowBackend = build  # type: ignore[misc, assignment]
