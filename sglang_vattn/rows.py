# SPDX-License-Identifier: Apache-2.0
"""Rows of running requests: who has which, what is asked of the mapper, when a row may be used again."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sglang_vattn.pool import VattnPool
from sglang_vattn.request_pages import RequestPages
from sglang_vattn.sharing import PathNode

logger = logging.getLogger(__name__)

ROWS_CLEANED_AT_ONCE = 8
IDLE_BEFORE_CLEANING_S = 0.1  # a gap between bursts of requests is no time to stall the GPU
TELL_INTERVAL_S = 10.0  # a driver that refuses everything must not fill the log
WAIT_SLICE_S = 0.1  # then look whether waiting is still of use


class RowTable:
    """Gives requests their rows and keeps the device table that leads from ``req_pool_idx`` to the row.

    Nothing here may change what the scheduler is told: a request without a row, or with a row that is not
    mapped yet, is read by pages.

    ``table`` : int32 tensor of shape (request slots,), on the pool's device. 0 is the dummy row.
    """

    def __init__(self, pool: VattnPool, request_slots: int) -> None:
        self.space = pool.space
        self.table = torch.zeros(request_slots, dtype=torch.int32, device=pool.device)
        self._guards = -(-pool.read_ahead // pool.page_size)
        self._on_cuda = pool.device.startswith("cuda")
        self._updates: dict[int, int] = {}
        self._told_s = -TELL_INTERVAL_S
        self._unmapped: set[RequestPages] = set()  # whose row is not known to be mapped in full
        # Rows given back since the last forward, then those that wait for the event behind it.
        self._released: list[int] = []
        self._waiting: list[tuple[Any, list[int]]] = []
        self._idle = True
        self._idle_since = 0.0
        self._unmaps_before = 0  # when requests began to run
        self._unmaps_running = 0  # in all earlier times that requests ran

    def grow(self, request: RequestPages) -> None:
        """Ask for the request's new pages to be mapped into its row; takes a row if it has none yet.

        What is mapped in a row stays as long as a forward may touch the row. So if another request took a page that
        was mapped ahead here, this request moves to a fresh row.
        """
        if request.valid < request.mapped:
            self.release(request)
        if request.row == 0:
            request.row = self.space.acquire_row()
            if request.row == 0:  # all rows in use: read by pages, try again when it grows next
                return
            self._updates[request.slot] = request.row
        if request.mapped < request.backed:
            self.space.map(request.row, request.mapped, (request.pages + request.ahead)[request.mapped :])
            request.mapped = request.valid = request.backed
        self._unmapped.add(request)

    def release(self, request: RequestPages) -> None:
        """Take the row back. A forward in flight may still read it, so it is retired only behind that one."""
        self._unmapped.discard(request)
        if request.row:
            self._updates[request.slot] = 0
            self.release_row(request.row)
            request.row = request.mapped = request.valid = 0

    def release_row(self, row: int) -> None:
        """As :meth:`release`, for a row that is no request's own."""
        self._released.append(row)

    def prefix_ready(self, node: PathNode) -> bool:
        """Whether the path to ``node`` is mapped in a row of its own; asks for that if it is not.

        Such a row ends in guard pages. What kernels read past the prefix is zero there, whatever the requests that
        share it make of their own pages.
        """
        if node.row == 0:
            node.row = self.space.acquire_row()
            if node.row == 0:
                return False
            self.space.map(node.row, 0, node.path() + [self.space.guard_page] * self._guards)
        return self.space.ready(node.row) == node.end + self._guards

    def ready(self, request: RequestPages) -> bool:
        """Whether all that a kernel may touch of the request is mapped in its row."""
        if request.row == 0 or request.valid < request.needed:
            return False
        if request in self._unmapped:
            if self.space.ready(request.row) < request.needed:
                self._tell_error(request.row)
                return False
            self._unmapped.discard(request)
        return True

    def _tell_error(self, row: int) -> None:
        """Log why a row is not mapped, if its mapping failed; SGLang's log names the rank."""
        error = self.space.error(row)
        if error and time.monotonic() - self._told_s >= TELL_INTERVAL_S:
            self._told_s = time.monotonic()
            failed = self.space.stats()["errors"]
            logger.warning("vattn: %s; the request reads by pages (%d driver calls failed so far)", error, failed)

    def wait(self, requests: list[RequestPages], timeout_s: float) -> bool:
        """Wait until the rows of all these requests are mapped; False when that cannot be or the time is up."""
        if any(request.row == 0 or request.valid < request.needed for request in requests):
            return False
        self.space.prefer([request.row for request in requests])
        deadline = time.monotonic() + timeout_s
        for request in requests:
            while not self.ready(request):
                left = deadline - time.monotonic()
                if left <= 0 or self.space.error(request.row) or self._mappings_used_up():
                    return False
                self.space.wait(request.row, request.needed, min(left, WAIT_SLICE_S))
        return True

    def _mappings_used_up(self) -> bool:
        """Whether live rows hold all mappings of the driver's budget: then nothing more is mapped for now."""
        stats = self.space.stats()
        return 0 < stats["max_mappings"] <= stats["mappings"] and stats["rows_retired"] == 0

    def before_forward(self) -> None:
        """On the forward's stream, before it: bring the device table up to date, retire rows that are done with."""
        if self._idle:
            self.space.clean(0)
            self._idle, self._unmaps_before = False, self.space.stats()["unmap_calls"]
        if self._updates:
            slots = torch.tensor(list(self._updates), dtype=torch.int64)
            rows = torch.tensor(list(self._updates.values()), dtype=torch.int32)
            if self._on_cuda:  # an unpinned copy would make the scheduler wait for the stream
                slots, rows = slots.pin_memory(), rows.pin_memory()
            device = self.table.device
            self.table[slots.to(device, non_blocking=True)] = rows.to(device, non_blocking=True)
            self._updates.clear()
        self.retire()

    def retire(self) -> None:
        """Hand rows to the mapper once every forward launched before their release has finished."""
        if self._released:
            if self._on_cuda:
                event = torch.cuda.Event()
                event.record()
                self._waiting.append((event, self._released))
            else:  # a forward on the host has finished when the call returns
                for row in self._released:
                    self.space.retire_row(row)
            self._released = []
        while self._waiting and self._waiting[0][0].query():
            for row in self._waiting.pop(0)[1]:
                self.space.retire_row(row)

    def idle(self) -> None:
        """No request runs: after a while unmap retired rows, a few a call, and no more once a request has arrived.

        One unmap call stalls a GPU for 0.2 ms, whatever its size (docs/benchmarks.md, 'Virtual memory').
        """
        if not self._idle:
            self._unmaps_running = self._count_unmaps_running()
            self._idle, self._idle_since = True, time.monotonic()
        self.retire()
        if time.monotonic() - self._idle_since >= IDLE_BEFORE_CLEANING_S:
            self.space.clean(ROWS_CLEANED_AT_ONCE)

    def _count_unmaps_running(self) -> int:
        now = 0 if self._idle else self.space.stats()["unmap_calls"] - self._unmaps_before
        return self._unmaps_running + now

    def stats(self) -> dict[str, int]:
        return {
            "rows_waiting": len(self._released) + sum(len(rows) for _, rows in self._waiting),
            "unmap_calls_running": self._count_unmaps_running(),  # made while requests ran
        }
