# SPDX-License-Identifier: Apache-2.0
"""Attention backends that read rows where a batch's rows are mapped, and pages otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def wrap_backend(name: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A factory for SGLang's attention registry: ours over a vattn pool, ``stock`` otherwise.

    Backends that have no row form here (Triton, FlashInfer) are SGLang's own, reading home slots.
    """

    def factory(runner: Any) -> Any:
        from sglang_vattn.pool import VattnPool

        if not isinstance(runner.token_to_kv_pool, VattnPool) or runner.is_draft_worker:
            return stock(runner)
        if name == "torch_native":
            from sglang_vattn.attention.host import HostRowBackend

            return HostRowBackend(runner)
        if name == "fa3":
            from sglang_vattn.attention.fa3 import Fa3RowBackend

            return Fa3RowBackend(runner)
        runner.token_to_kv_pool_allocator.reading.rows_possible = False
        return stock(runner)

    return factory
