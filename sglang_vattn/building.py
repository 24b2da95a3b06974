# SPDX-License-Identifier: Apache-2.0
"""Hooks into the places where SGLang builds its pools, its tree and its attention backend.

Where SGLang would silently build its own class, the hook looks at the result and raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_vattn import _core, args, attention, ranks
from sglang_vattn.allocator import VattnAllocator
from sglang_vattn.attention.variants import SHARED, RowGraphVariants
from sglang_vattn.pool import RowPlan, VattnPool
from sglang_vattn.reading import LEAST_BATCH
from sglang_vattn.tree_cache import VattnTreeCache

logger = logging.getLogger(__name__)


def config() -> Any:
    """The plugin's part of SGLang's published configuration."""
    from sglang.srt.runtime_context import get_context

    return get_context().config_bag(args.NAMESPACE)


def build_pool(original: Callable[..., Any], self: Any, **kw: Any) -> Any:
    """Around ``KVCacheConfigurator._build_token_to_kv_pool``: tell the pool its rows, check what was built."""
    if self.is_draft_worker:
        return original(self, **kw)
    requests, tokens = kw["req_to_token_pool"].req_to_token.shape
    VattnPool.row_plan = RowPlan(requests, tokens, config().vattn_rows)
    try:
        pool = original(self, **kw)
    except _core.DriverError as error:  # SGLang then ends all ranks; this says whose fault it was
        raise _core.DriverError(f"{ranks.name_of_this_rank()}{error}") from error
    if type(pool) is not VattnPool:
        raise ValueError(
            f"--kv-backend vattn does not support this model, whose KV pool is a {type(pool).__name__}: "
            "use --kv-backend default"
        )
    return pool


def pool_class(original: Callable[..., type], self: Any, *, kind: str, default: type) -> type:
    """Around ``KVCacheConfigurator._resolve_kv_pool_class``: our pool in the place of the MHA pool."""
    chosen = original(self, kind=kind, default=default)
    return VattnPool if kind == "mha" and not self.is_draft_worker else chosen


def build_allocator(original: Callable[..., Any], self: Any, **kw: Any) -> Any:
    """Around ``KVCacheConfigurator._build_token_to_kv_pool_allocator``: our allocator over our pool."""
    pool = kw["token_to_kv_pool"]
    if not isinstance(pool, VattnPool) or kw["token_to_kv_pool_allocator"] is not None:
        return original(self, **kw)
    allocator = VattnAllocator(
        kw["sizes"].max_total_num_tokens,
        dtype=self.kv_cache_dtype,
        device=self.device,
        pool=pool,
        request_slots=kw["req_to_token_pool"].req_to_token.shape[0],
        read_mode=config().vattn_read,
        share_prefixes=config().vattn_shared_decode != "off",
        scrub=config().vattn_scrub == "on",
    )
    allocator.reading.ranks = ranks.tensor_parallel(allocator)
    return allocator


def graph_variants(original: Callable[..., Any], hf_config: Any) -> Any:
    """Around ``create_attention_graph_variants``: a second variant of each decode graph, if a backend has rows.

    SGLang asks for it once, for its target model's decode graphs, after it has built the attention backend.
    """
    backend = attention.with_variants
    return original(hf_config) if backend is None else RowGraphVariants(backend.allocator.reading)


def capture_one_shape(original: Callable[..., Any], self: Any, size: int, *a: Any, **kw: Any) -> Any:
    """Around ``DecodeCudaGraphRunner.capture_one_shape``: no graph for a variant that is never chosen at its size."""
    variant: str = kw.get("attention_variant", a[3] if len(a) > 3 else "")
    variants = self.attention_graph_variants
    if not isinstance(variants, RowGraphVariants):
        return original(self, size, *a, **kw)
    result = None
    if variant != SHARED or size >= LEAST_BATCH:
        with variants.captured(variant):
            result = original(self, size, *a, **kw)
    if size == min(self.capture_bs) and variant == variants.capture_labels[-1]:  # SGLang captures the largest first
        logger.info("vattn decode graphs: %s", variants.describe())
    return result


def build_tree(context: Any) -> VattnTreeCache:
    """Factory of the radix cache backend ``vattn``."""
    return VattnTreeCache(context.params)


def register_factories() -> list[str]:
    """Enter our factories into SGLang's registries, which are dictionaries and so not reached by hooks.

    Returns
    -------
    list of str
        What could not be registered. Idempotent.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    from sglang_vattn.arguments import resolve_page_size

    factory = get_radix_cache_factory("vattn")
    if factory is None:
        register_radix_cache_backend("vattn", build_tree)
        register_resolution_hook("handle_mxfp8_kv_cache_compatibility")(resolve_page_size)
        for name, stock in list(attention_registry.ATTENTION_BACKENDS.items()):
            attention_registry.ATTENTION_BACKENDS[name] = attention.wrap_backend(name, stock)
    elif factory is not build_tree:
        return ["radix cache backend 'vattn' (another plugin registered that name)"]
    return []
