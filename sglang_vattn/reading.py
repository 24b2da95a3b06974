# SPDX-License-Identifier: Apache-2.0
"""How the next batch reads the KV cache: by rows, by pages, or a common prefix once for all who share it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sglang_vattn.attention.variants import PAGED, ROWS, SHARED
from sglang_vattn.ranks import Ranks
from sglang_vattn.request_pages import RequestPages
from sglang_vattn.rows import RowTable
from sglang_vattn.sharing import Group, SharedPaths

WAIT_LIMIT_S = 10.0  # under --vattn-read rows; after it the batch reads by pages, which is always right
# Two-level decode costs two more launches and a merge a layer. It pays from about this many bytes of K and V that
# are not read again, a layer (docs/benchmarks.md, 'Decode with a shared prefix'); a group of its own needs less.
LEAST_SAVED_BYTES = int(os.environ.get("VATTN_SHARED_DECODE_BYTES", 128 << 20))
LEAST_SAVED_BYTES_OF_A_GROUP = LEAST_SAVED_BYTES // 8
LEAST_MEMBERS = 2
LEAST_DEFERRED_TOKENS = 1024  # a hit this long will most likely be read by a group
LEAST_BATCH = 8  # below it, nothing pays; the graphs for smaller batches have no such variant
REQUESTS_PER_GROUP = 8  # room for one group an eighth of the batch: empty room in a graph is not free


def group_room(batch: int) -> int:
    """How many groups a batch of this size may have."""
    return max(1, batch // REQUESTS_PER_GROUP)


class Reading:
    """The decision for each batch, made on the scheduler's thread and read by the attention backend.

    All ways give the same result: contiguity is a cache, so this decision may depend on timing while nothing told
    to the scheduler does. Ranks of one model vote on it (see :mod:`sglang_vattn.ranks`).

    Attributes
    ----------
    by_rows : bool
        Every request of the batch may be read in its row.
    groups : list of Group
        The groups whose prefix is read once, with members by index in the batch; empty when that does not pay.
    groups_version : int
        Changes whenever ``groups`` does.
    """

    def __init__(self, mode: str, rows: RowTable, *, page_size: int, page_bytes_per_layer: int, share: bool) -> None:
        self.mode = mode
        self.rows = rows
        self.rows_possible = True  # whether the attention backend has a form for rows
        self.share_possible = False  # ... and for groups; the backend says so
        self.pages_as_fast = False  # whether the kernel reads pages at the speed of rows; the backend says so
        self.share = share
        self.ranks: Ranks | None = None  # of tensor parallelism; None for one
        self.paths = SharedPaths()
        self.least_saved_pages = max(1, LEAST_SAVED_BYTES // page_bytes_per_layer)
        self.least_saved_pages_of_a_group = max(1, LEAST_SAVED_BYTES_OF_A_GROUP // page_bytes_per_layer)
        self.least_deferred_pages = min(self.least_saved_pages_of_a_group, max(1, LEAST_DEFERRED_TOKENS // page_size))
        self.by_rows = False
        self.groups: list[Group] = []
        self.groups_version = 0
        self.counters = dict.fromkeys(
            ("batches_rows", "batches_pages", "batches_shared", "batches_waited", "groups", "members", "pages_saved"), 0
        )
        self._seen: tuple[Sequence[RequestPages], int] = ([], -1)
        self._candidates: list[Group] = []

    def plan(self, requests: list[RequestPages], *, decode: bool) -> None:
        """Decide for the batch of these requests."""
        sharing = decode and self.share and self.share_possible and len(requests) >= LEAST_BATCH
        if not sharing:
            self._candidates, self._seen = [], ([], -1)
        candidates = self._find_groups(requests) if sharing else []
        ready = [self.rows.prefix_ready(group.node) for group in candidates]
        if decode:
            self._map_deferred(requests)
        readable = bool(requests) and self.rows_possible and self.mode != "pages"
        by_rows = readable and self._rows_ready(requests)
        if self.ranks is not None and (readable or candidates):
            # Where all groups are ready the variant is `shared`, whatever the rows.
            *ready, by_rows = self.ranks.all_ready(
                [*ready, by_rows], self._question(requests, decode), settled_by=len(ready) or 1
            )
        self.by_rows = by_rows
        groups = [group for group, is_ready in zip(candidates, ready, strict=True) if is_ready]
        if groups != self.groups:
            self.groups = groups
            self.groups_version += 1
        self._count()

    @property
    def variant(self) -> str:
        """The label of the decode graph for this batch."""
        return SHARED if self.groups else ROWS if self.by_rows else PAGED

    def defers_row(self, request: RequestPages) -> bool:
        """Whether a request that was just admitted gets its row only when it decodes outside a group.

        One with a long hit will most likely read its prefix with others, from one row: to alias it into a row of its
        own, 38 us a page, would be for nothing. Its first forward reads pages, so not where that is slow.
        """
        sharing = self.share and self.share_possible and self.pages_as_fast and self.mode == "auto"
        return sharing and request.shared >= self.least_deferred_pages

    def _map_deferred(self, requests: list[RequestPages]) -> None:
        grouped = {index for group in self._candidates for index in group.members}
        for index, request in enumerate(requests):
            if request.row_deferred and index not in grouped:
                request.row_deferred = False
                self.rows.grow(request)

    def forget(self, request: RequestPages) -> None:
        """The request is gone: its paths, and the rows that only its paths needed."""
        self.paths.leave(request)
        while self.paths.vanished:
            self.rows.release_row(self.paths.vanished.pop())

    def _find_groups(self, requests: list[RequestPages]) -> list[Group]:
        for request in requests:
            if request not in self.paths:
                self.paths.join(request, len(request.pages) - 1)  # all but the last page are full
        if self._seen != (requests, self.paths.version):
            self._seen = (requests, self.paths.version)
            found = self.paths.groups(
                requests, least_members=LEAST_MEMBERS, least_pages=self.least_saved_pages_of_a_group
            )
            found = sorted(found, key=lambda group: -group.saved_pages)[: group_room(len(requests))]
            worth = sum(group.saved_pages for group in found) >= self.least_saved_pages
            self._candidates = found if worth else []
        return self._candidates

    def _question(self, requests: list[RequestPages], decode: bool) -> list[object]:
        """Changes, as do the pool's counters, when a row or a prefix that was ready may not be any more."""
        needed = sum(request.needed for request in requests)
        return [requests, decode, needed, self.paths.version]

    def _rows_ready(self, requests: list[RequestPages]) -> bool:
        if all(self.rows.ready(request) for request in requests):
            return True
        if self.mode == "auto":
            return False
        self.counters["batches_waited"] += 1
        return self.rows.wait(requests, WAIT_LIMIT_S)

    def _count(self) -> None:
        self.counters[{SHARED: "batches_shared", ROWS: "batches_rows", PAGED: "batches_pages"}[self.variant]] += 1
        for group in self.groups:
            self.counters["groups"] += 1
            self.counters["members"] += len(group.members)
            self.counters["pages_saved"] += group.saved_pages
