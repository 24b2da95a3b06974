# SPDX-License-Identifier: Apache-2.0
"""Attention kernels that read rows, one file each; ``--vattn-kernel`` chooses one (docs/kernels.md)."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from sglang_vattn.attention.kernels.base import KernelMissing, RowBatch, RowKernel

__all__ = ["KERNELS", "KernelMissing", "RowBatch", "RowKernel", "kernel_class", "load", "refusal"]

#: name -> module:class. Nothing is imported before it is asked for.
KERNELS = {
    "fa3": "sglang_vattn.attention.kernels.fa3:FlashAttention3",
    "fa2": "sglang_vattn.attention.kernels.fa2:FlashAttention2",
    "fa4": "sglang_vattn.attention.kernels.fa4:FlashAttention4",
    "flashinfer": "sglang_vattn.attention.kernels.flashinfer:FlashInfer",
    "sdpa": "sglang_vattn.attention.kernels.sdpa:Sdpa",
    "torch": "sglang_vattn.attention.kernels.torch_varlen:TorchVarlen",
}


def kernel_class(name: str) -> type[RowKernel]:
    """The class of a name in ``KERNELS``, or of ``module:Class``; importing its module imports no kernel.

    Raises
    ------
    KernelMissing
        If there is none.
    """
    module, _, attribute = KERNELS.get(name, name).partition(":")
    try:
        found = getattr(import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError) as error:
        raise KernelMissing(f"--vattn-kernel {name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RowKernel)):
        raise KernelMissing(f"--vattn-kernel {name}: use auto, {', '.join(KERNELS)}, or module:Class of a RowKernel")
    return found


def refusal(name: str, *, device: str, kv_dtype: torch.dtype | None = None, graphs: bool = False) -> str | None:
    """Why ``--vattn-kernel name`` cannot be honoured, in one line that says what to change; None if it can.

    Imports no kernel, so that the launcher can ask: it must not open the GPU.

    Parameters
    ----------
    kv_dtype
        Of the KV cache; None where that is not known yet.
    graphs
        Whether decode graphs are captured.
    """
    try:
        found, flag = kernel_class(name), f"--vattn-kernel {name}"
    except KernelMissing as error:
        return str(error)
    otherwise = "or use --vattn-kernel auto"
    if device not in found.devices:
        return f"{flag} runs on {' and '.join(found.devices)}, not on --device {device}: {otherwise[3:]}"
    if not _present(found.module):
        return f"{flag} needs the package {found.package}: pip install {found.package}, {otherwise}"
    if kv_dtype is not None and kv_dtype not in found.kv_dtypes:
        known = ", ".join(_short(dtype) for dtype in found.kv_dtypes)
        return f"{flag} reads no {_short(kv_dtype)} KV, only {known}: change --kv-cache-dtype, {otherwise}"
    if graphs and not found.capturable:
        return f"{flag} cannot be captured in decode graphs: add --disable-decode-cuda-graph, {otherwise}"
    return None


def load(name: str, device: str = "cuda", kv_dtype: torch.dtype | None = None) -> RowKernel:
    """The kernel, ready to be called.

    Raises
    ------
    KernelMissing
        In one line, with the package to install or the flag to change.
    """
    if reason := refusal(name, device=device, kv_dtype=kv_dtype):
        raise KernelMissing(reason)
    found = kernel_class(name)
    try:
        return found()
    except (ImportError, OSError) as error:  # it is there, and does not fit: another torch, another CUDA
        raise KernelMissing(
            f"--vattn-kernel {name}: the package {found.package} does not load ({error}): reinstall it, or use "
            "--vattn-kernel auto"
        ) from error


def _present(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
