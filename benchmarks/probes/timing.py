# SPDX-License-Identifier: Apache-2.0
"""Calls of many layers in one CUDA graph, as the engine replays them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def us_a_layer(call: Callable[[], object], layers: int, rounds: int = 12) -> float:
    """Median microseconds a layer over ``rounds`` replays of the captured call, which covers ``layers`` layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / layers)
    return float(round(sorted(times)[len(times) // 2], 2))
