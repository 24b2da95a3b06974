# SPDX-License-Identifier: Apache-2.0
"""Attention backends that read rows where a batch's rows are mapped, and pages otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_vattn.pool import VattnPool


def wrap_backend(name: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A factory for SGLang's attention registry: ours over a vattn pool, ``stock`` otherwise.

    Backends that have no row form here (Triton, FlashInfer) are SGLang's own, reading home slots.
    """

    def factory(runner: Any) -> Any:
        if not isinstance(runner.token_to_kv_pool, VattnPool) or runner.is_draft_worker:
            return stock(runner)
        if name == "torch_native":
            from sglang_vattn.attention.host import HostRowBackend

            return HostRowBackend(runner)
        return stock(runner)

    return factory
