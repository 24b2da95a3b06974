# SPDX-License-Identifier: Apache-2.0
"""Two SGLang plugins for tests. A server with this folder in PYTHONPATH loads those that
SGLANG_PLUGINS names; it needs no installation, since the folder holds a .dist-info too.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def _name(thing: object) -> str:
    cls = type(thing)
    return f"{cls.__module__}.{cls.__qualname__}"


def _add_classes(result: Any, scheduler: Any, *_args: object, **_kwargs: object) -> None:
    allocator, runner = scheduler.token_to_kv_pool_allocator, scheduler.tp_worker.model_runner
    things = {
        "pool": allocator.get_kvcache(),
        "allocator": allocator,
        "rows": scheduler.req_to_token_pool,
        "tree": scheduler.tree_cache,
        "attention": runner.attn_backend,
        "scheduler": scheduler,
    }
    result.internal_state["classes"] = {what: _name(thing) for what, thing in things.items()}


def report_classes() -> None:
    """Plugin `probe`: /server_info names the classes that serve."""
    target = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
    HookRegistry.register(target, _add_classes, HookType.AFTER)


def spoil_one_hook_in_children() -> None:
    """Plugin `saboteur`: in child processes, one hook of the plugin under test fails to apply.

    SGLang logs such a failure and goes on without the hook.
    """
    if multiprocessing.parent_process() is None:
        return
    apply = HookRegistry._apply_target

    def spoiled(target: str, hooks: list[Any]) -> None:
        if target.endswith(".forward_batch_generation"):
            raise RuntimeError("the saboteur was here")
        apply(target, hooks)

    HookRegistry._apply_target = staticmethod(spoiled)
