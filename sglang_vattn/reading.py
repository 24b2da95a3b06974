# SPDX-License-Identifier: Apache-2.0
"""How the next batch reads the KV cache: by rows or by pages."""

from __future__ import annotations

from sglang_vattn.requests import RequestPages
from sglang_vattn.rows import RowTable

WAIT_LIMIT_S = 10.0  # under --vattn-read rows; after it the batch reads by pages, which is always right


class Reading:
    """The decision for each batch, made on the scheduler's thread and read by the attention backend.

    ``by_rows`` is True while the batch that runs may read its requests' rows. Both ways give the same result:
    contiguity is a cache, so this decision may depend on timing while nothing told to the scheduler does.
    """

    def __init__(self, mode: str, rows: RowTable) -> None:
        self.mode = mode
        self.rows = rows
        self.by_rows = False
        self.batches_rows = 0
        self.batches_pages = 0
        self.waits = 0

    def plan(self, requests: list[RequestPages]) -> None:
        """Decide for the batch of these requests."""
        self.by_rows = bool(requests) and self.mode != "pages" and self._rows_ready(requests)
        if self.by_rows:
            self.batches_rows += 1
        else:
            self.batches_pages += 1

    def _rows_ready(self, requests: list[RequestPages]) -> bool:
        if all(self.rows.ready(request) for request in requests):
            return True
        if self.mode == "auto":
            return False
        self.waits += 1
        return self.rows.wait(requests, WAIT_LIMIT_S)
