# SPDX-License-Identifier: Apache-2.0
"""The variants of each decode graph: SGLang captures one graph a label and asks us, per batch, which to replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    def select(self, forward_batch: Any) -> str:
        return self.reading.variant
