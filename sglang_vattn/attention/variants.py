# SPDX-License-Identifier: Apache-2.0
"""The variants of each decode graph: SGLang captures one graph a label and asks us, per batch, which to replay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_vattn.reading import Reading

PAGED = "paged"  # by page table over home slots: always possible
ROWS = "rows"  # every request in its row
SHARED = "shared"  # a common prefix once, in a row of its own, and each request's own part by pages


class RowGraphVariants:
    """SGLang's ``AttentionGraphVariants``: a batch whose rows are not ready replays the paged graph."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        labels = {PAGED: True, ROWS: reading.rows_possible and reading.mode != "pages"}
        labels[SHARED] = reading.share and reading.share_possible
        self.capture_labels = tuple(label for label, wanted in labels.items() if wanted)

        self.costs: dict[str, tuple[int, float, int]] = {}  # of each variant: graphs, seconds, bytes

    def select(self, forward_batch: Any) -> str:
        return self.reading.variant

    @contextmanager
    def captured(self, variant: str) -> Iterator[None]:
        """Around the capture of one graph, for :meth:`describe`."""
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        yield
        graphs, seconds, used = self.costs.get(variant, (0, 0.0, 0))
        seconds, used = seconds + time.perf_counter() - began, used + free - torch.cuda.mem_get_info()[0]
        self.costs[variant] = graphs + 1, seconds, used

    def describe(self) -> str:
        """``paged 20 in 3.1 s, 30 MiB; rows ...``."""
        return "; ".join(
            f"{variant} {graphs} in {seconds:.1f} s, {used / 2**20:.0f} MiB"
            for variant, (graphs, seconds, used) in self.costs.items()
        )
