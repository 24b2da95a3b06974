# SPDX-License-Identifier: Apache-2.0
"""Attention backends that read rows where a batch's rows are mapped, and pages otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The backend of this process's model whose decode graphs come in variants; ``building.graph_variants`` asks for it.
with_variants: Any = None


def wrap_backend(name: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A factory for SGLang's attention registry: ours over a vattn pool, ``stock`` otherwise.

    Backends that have no row form of their own (Triton, FlashInfer) are SGLang's own, reading home slots, unless
    ``--vattn-kernel`` names a kernel for rows.
    """

    def factory(runner: Any) -> Any:
        from sglang_vattn.pool import VattnPool

        global with_variants
        if not isinstance(runner.token_to_kv_pool, VattnPool) or runner.is_draft_worker:
            return stock(runner)
        chosen = _kernel_name()
        if name == "torch_native":
            from sglang_vattn.attention.host import HostRowBackend
            from sglang_vattn.attention.kernels import load

            return HostRowBackend(runner, load("sdpa" if chosen == "auto" else chosen, "cpu", runner.kv_cache_dtype))
        if name == "fa3" and chosen in ("auto", "fa3"):
            from sglang_vattn.attention.fa3 import Fa3RowBackend

            with_variants = Fa3RowBackend(runner)
            return with_variants
        if chosen != "auto":
            from sglang_vattn.attention.any_kernel import read_rows_with
            from sglang_vattn.attention.kernels import load

            kernel = load(chosen, runner.device, runner.kv_cache_dtype)
            backend = read_rows_with(kernel, stock(runner), runner)
            if kernel.capturable:
                with_variants = backend
            return backend
        runner.token_to_kv_pool_allocator.reading.rows_possible = False
        return stock(runner)

    return factory


def _kernel_name() -> str:
    from sglang.srt.runtime_context import get_context

    from sglang_vattn.args import NAMESPACE

    name: str = get_context().config_bag(NAMESPACE).vattn_kernel
    return name
