# SPDX-License-Identifier: Apache-2.0
"""Every place where the plugin reaches into SGLang. ``plugin.install`` walks this table and checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_vattn import arguments, building, reporting, running
from sglang_vattn.building import register_factories
from sglang_vattn.observe import observer, page

__all__ = ["HOOKS", "PAGE_HOOKS", "Hook", "register_factories"]


class Hook(NamedTuple):
    target: str
    kind: str  # a name of sglang.srt.plugins.hook_registry.HookType
    function: Callable[..., Any]
    purpose: str


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker."
_COMPONENTS = "sglang.srt.managers.scheduler_components."
_STATE = _COMPONENTS + "internal_state.SchedulerInternalStateController."
_POOL_STATS = _COMPONENTS + "pool_stats_observer.PoolStats."
_REPORTER = _COMPONENTS + "metrics_reporter.SchedulerMetricsReporter."
_METRICS = "sglang.srt.observability.metrics_collector."

HOOKS = (
    Hook("sglang.srt.server_args.ServerArgs.check_server_args", "AROUND", arguments.check_server_args, "last check"),
    Hook(_CONFIGURATOR + "_build_token_to_kv_pool", "AROUND", building.build_pool, "rows; is it our pool?"),
    Hook(_CONFIGURATOR + "_resolve_kv_pool_class", "AROUND", building.pool_class, "our pool"),
    Hook(_CONFIGURATOR + "_build_token_to_kv_pool_allocator", "AROUND", building.build_allocator, "our allocator"),
    Hook("sglang.srt.mem_cache.allocation.alloc_for_extend", "AROUND", running.alloc_for_extend, "pages by request"),
    Hook("sglang.srt.mem_cache.allocation.alloc_for_decode", "AROUND", running.alloc_for_decode, "pages by request"),
    Hook("sglang.srt.mem_cache.common.touch_waiting_prefix", "AROUND", running.touch_waiting_prefix, "namespaces"),
    Hook(
        "sglang.srt.layers.attention.graph_variants.create_attention_graph_variants",
        "AROUND",
        building.graph_variants,
        "a decode graph by pages and one by rows",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        "AROUND",
        building.capture_one_shape,
        "no graphs that are never replayed",
    ),
    Hook(_WORKER + "forward_batch_generation", "BEFORE", running.before_forward, "copies, row table, plan"),
    Hook(_WORKER + "forward_batch_embedding", "BEFORE", running.before_forward, "the same for embedding models"),
    Hook(_STATE + "get_internal_state", "AROUND", observer.internal_state, "/server_info, /vattn/state"),
    Hook("sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter", "AFTER", observer.attach, "the observer"),
    Hook(_POOL_STATS + "get_prefill_usage_msg_parts", "AFTER", observer.add_log_part, "SGLang's log line"),
    Hook(_POOL_STATS + "get_decode_usage_msg_parts", "AFTER", observer.add_log_part, "SGLang's log line"),
    Hook(_METRICS + "SchedulerMetricsCollector.log_stats", "AFTER", observer.export, "/metrics"),
    Hook(_REPORTER + "_maybe_log_idle_metrics", "AFTER", observer.export_when_idle, "/metrics of an idle server"),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        "AFTER",
        reporting.output_streamer_class,
        "meta_info",
    ),
)

# Only with --vattn-page: they import SGLang's HTTP server.
PAGE_HOOKS = (
    Hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", "BEFORE", page.add_routes, "/vattn"),
)
