# SPDX-License-Identifier: Apache-2.0
"""Hooks into SGLang's resolution of its arguments: the page size, the tree backend, the final check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_vattn import args, refusals
from sglang_vattn.geometry import PageGeometry, page_geometry
from sglang_vattn.pool import granule_bytes

KV_ITEMSIZE = {"fp8_e4m3": 1, "fp8_e5m2": 1}  # every other supported --kv-cache-dtype but "auto" has 2 bytes


def resolve_page_size(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wraps SGLang's last overridable step before it fills in the default page size."""
    previous(server_args)
    if not args.enabled(server_args):
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    page_size = _geometry(server_args, view).page_size
    resolved: dict[str, Any] = {"page_size": page_size, "radix_cache_backend": "vattn"}
    chunk = view.chunked_prefill_size
    if chunk and chunk > 0 and chunk % page_size:  # SGLang asserts later that chunks are whole pages
        resolved["chunked_prefill_size"] = max(page_size, chunk // page_size * page_size)
    declare_resolution(server_args, "vattn", **resolved)


def check_server_args(original: Callable[..., None], self: Any, *a: Any, **kw: Any) -> None:
    """Around ``ServerArgs.check_server_args``: the last look at the resolved values, in the main process."""
    original(self, *a, **kw)
    if not args.enabled(self):
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(self)
    try:
        refusals.check_resolved(view, page_size=_geometry(self, view).page_size)
    except refusals.Refused as error:
        refusals.stop(self, error)


def _geometry(server_args: Any, view: Any) -> PageGeometry:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    model = model_config_of(server_args)
    refusals.check_model(model)
    attention_ranks = max(1, view.tp_size // max(1, getattr(view, "attn_dp_size", None) or 1))
    itemsize = model.dtype.itemsize if view.kv_cache_dtype == "auto" else KV_ITEMSIZE.get(view.kv_cache_dtype, 2)
    try:
        return page_geometry(
            layers=model.num_hidden_layers,
            kv_heads=model.get_num_kv_heads(attention_ranks),
            k_dim=model.head_dim,
            v_dim=getattr(model, "v_head_dim", None) or model.head_dim,
            itemsize=itemsize,
            granule_bytes=granule_bytes(str(view.device)),
            page_size=server_args.page_size,
        )
    except ValueError as error:
        raise refusals.Refused(str(error)) from None
