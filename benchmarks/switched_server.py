# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang.launch_server`, with a switch that leaves metrics out while it serves: for `observe_cost`.

Two processes of the same code differ by some percent, which is more than looking costs. So on and off are one server.
While the file named by SWITCH exists, what SWITCHED names does nothing: ``ours``, this plugin's metrics and log part;
``all``, SGLang's metrics as well, in the scheduler and in the HTTP server; or ``nothing``. A thread in each process
looks for the file every LAG_S / 2 and exchanges functions and flags, so that nothing is asked in a step.

SGLang spawns its processes, and a spawned process imports this module again as `__mp_main__`: that is how the switch
comes into each of them.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SWITCH, SWITCHED = "VATTN_BENCH_SWITCH", "VATTN_BENCH_SWITCHED"
LAG_S = 0.05  # after the file has come or gone, all processes have seen it

Flip = tuple[Any, str, Any]  # an object, its attribute, and what that is while it is switched off


def nothing(*a: Any, **kw: Any) -> None:
    return None


def ours() -> list[Flip]:
    from sglang_vattn.observe.observer import Observer

    return [(Observer, "log_part", lambda self: ""), (Observer, "export", nothing)]


def sglangs(instances: list[Any]) -> list[Flip]:
    """What `--enable-metrics` turns on: the collectors' methods, and the flags under which SGLang calls them."""
    from sglang.srt.observability import func_timer, http_request_metrics, metrics_collector

    collectors = [each for name, each in vars(metrics_collector).items() if name.endswith("Collector")]
    flips: list[Flip] = [
        (each, name, nothing)
        for each in collectors
        for name in vars(each)
        if name.startswith(("log_", "increment_", "observe_"))
    ]
    flips += [(func_timer, "enable_metrics", False), (http_request_metrics, "_http_request_metrics", None)]
    for each in instances:
        flips.append((each, "enable_metrics", False))
        if hasattr(each, "scheduler_stage_metrics"):  # the scheduler's
            flips.append((each, "current_scheduler_metrics_enabled", False))
            flips.append((each.scheduler_stage_metrics, "enabled", False))
    return flips


def remember(cls: type, initialize: str, instances: list[Any]) -> None:
    """Keep what is made of a class: its flag is its own."""
    original = getattr(cls, initialize)

    @functools.wraps(original)
    def remembering(self: Any, *a: Any, **kw: Any) -> None:
        original(self, *a, **kw)
        instances.append(self)

    setattr(cls, initialize, remembering)


class Switch:
    def __init__(self, flips: Callable[[], list[Flip]]) -> None:
        self._flips = flips
        self._on: list[Flip] = []  # what was there before it was switched off

    def set(self, off: bool) -> None:
        if off and not self._on:
            flips = self._flips()
            self._on = [(owner, name, getattr(owner, name)) for owner, name, _ in flips]
            for owner, name, value in flips:
                setattr(owner, name, value)
        elif not off:
            for owner, name, value in self._on:
                setattr(owner, name, value)
            self._on = []

    def follow(self, path: Path) -> None:
        """Until the process ends."""
        while True:
            self.set(path.exists())
            time.sleep(LAG_S / 2)


def install() -> None:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    instances: list[Any] = []
    remember(SchedulerMetricsReporter, "__post_init__", instances)
    remember(TokenizerManager, "__init__", instances)
    plugin, switched = os.environ.get("SGLANG_PLUGINS") != "none", os.environ[SWITCHED]

    def flips() -> list[Flip]:
        found = ours() if plugin and switched != "nothing" else []
        return found + (sglangs(instances) if switched == "all" else [])

    threading.Thread(target=Switch(flips).follow, args=(Path(os.environ[SWITCH]),), daemon=True).start()


if __name__ in ("__main__", "__mp_main__"):
    install()
if __name__ == "__main__":
    from sglang.launch_server import kill_process_tree, load_plugins, prepare_server_args, run_server

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
