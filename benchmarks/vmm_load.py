# SPDX-License-Identifier: Apache-2.0
"""A memory-bound read over rows: beside mapping and unmapping, and from two layouts of the same pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Row, median, quartile_spread, spread
from benchmarks.vmm import KIB, MIB, WAIT_S, open_driver, shuffled
from sglang_vattn import _core

HEADS, DIM, ITEM = 8, 128, 2  # K or V of a token and layer: 2 KiB
WIDTH = 2 * HEADS * DIM  # elements, K and V
READ_TOKENS = {"cpu": 8192, "cuda": 64 * 8192}
LAYERS = {"cpu": 4, "cuda": 32}
PAGE_BYTES = {"cpu": 64 * KIB, "cuda": 16 * MIB}
CHURN_PAGES = 256  # that the background maps again and again


@dataclass(frozen=True)
class Background:
    """What happens beside the read: maps, and an unmap call of so many pages, so many seconds apart."""

    name: str
    pages_a_call: int = 0
    gap_s: float = 0.0
    unmap: bool = False


BACKGROUNDS = (
    Background("alone"),
    Background("maps, 16 at once", 16),
    Background("maps, 16 every 2 ms", 16, 0.002),
    Background("an unmap call of 1 page every 2 ms", 1, 0.002, unmap=True),
    Background("an unmap call of 64 pages every 2 ms", 64, 0.002, unmap=True),
)


@dataclass
class Beside:
    """What was measured beside one background."""

    ms: list[float]
    seconds: float
    pages: int
    unmaps: int


class Rows:
    """An address space whose row 1 holds the tokens to read and whose other rows are for the background."""

    def __init__(self, device: str, tokens: int, layers: int) -> None:
        self.device, self.layers, self.tokens = device, layers, tokens
        page_bytes = PAGE_BYTES[device]
        token_bytes = layers * WIDTH * ITEM
        pages = -(-tokens * token_bytes // page_bytes)
        self.space = _core.AddressSpace(
            open_driver(device), pages + CHURN_PAGES, page_bytes, 32, max(pages, 16 * CHURN_PAGES)
        )
        order = shuffled(self.space.num_pages)
        self.order, self.spare = order[:pages], order[pages:]
        self.row = self.space.acquire_row()
        self.space.map(self.row, 0, self.order)
        assert self.space.wait(self.row, pages, WAIT_S), self.space.error(self.row)
        self.flat = torch.from_dlpack(self.space.rows()).view(torch.bfloat16)
        self.start = self.row * self.space.pages_per_row * page_bytes // ITEM

    def sliced(self, layer: int) -> torch.Tensor:
        """K and V of a layer, (tokens, width), in pages that hold all layers of a token."""
        return self.flat.as_strided((self.tokens, WIDTH), (self.layers * WIDTH, 1), self.start + layer * WIDTH)

    def layered(self, layer: int) -> torch.Tensor:
        """The same number of bytes, in pages that hold one layer."""
        return self.flat.as_strided((self.tokens, WIDTH), (WIDTH, 1), self.start + layer * self.tokens * WIDTH)

    def close(self) -> None:
        del self.flat
        self.space.close()


def reader(device: str) -> Callable[[torch.Tensor], Any]:
    """Reads a (tokens, width) view once, at memory bandwidth."""
    if device == "cpu":
        return lambda view: view.view(torch.float32).sum()
    from benchmarks.vmm_triton import read

    return read


def timed(device: str, call: Callable[[], object]) -> float:
    """Milliseconds of the device's time."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


@contextmanager
def running(rows: Rows, background: Background) -> Iterator[None]:
    """Maps pages into fresh addresses of a row, and with ``unmap`` takes each call's pages out again."""
    stop = threading.Event()
    errors: list[str] = []
    used: list[int] = []

    def churn() -> None:
        space, count, end = rows.space, background.pages_a_call, 0
        budget = space.stats()["max_mappings"] // 2  # the host's; 0 on CUDA, where there is no limit
        while not stop.is_set() and (not budget or space.stats()["mappings"] < budget):
            if not used or end + count > space.pages_per_row:  # the old row is unmapped after the measurement
                row, end = space.acquire_row(), 0
                if row == 0:
                    errors.append("no row left: make num_rows larger")
                    return
                used.append(row)
            space.map(row, end, rows.spare[end % CHURN_PAGES :][:count] or rows.spare[:count])
            end = len(space.row_pages(row))
            if not space.wait(row, end, WAIT_S):
                errors.append(space.error(row))
                return
            if background.unmap:
                space.truncate(row, end - count)
                end -= count
                space.drain(WAIT_S)
            if background.gap_s:
                time.sleep(background.gap_s)

    thread = threading.Thread(target=churn)
    if background.pages_a_call:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if background.pages_a_call:
            thread.join()
        for row in used:
            rows.space.retire_row(row)
        rows.space.clean()
        rows.space.drain(WAIT_S)
    assert not errors, errors


def beside(device: str, rounds: int, small: bool) -> Iterator[Row]:
    """The read alone and beside each background."""
    layers, tokens = LAYERS[device], READ_TOKENS[device] // (4 if small else 1)
    if device == "cuda":
        layers = 4  # of the token's layers; the read goes over all of them again and again
    read = reader(device)
    with closing(Rows(device, tokens, layers)) as rows:
        views = [rows.sliced(layer) for layer in range(layers)]
        repeats = 4

        def call() -> None:
            for _ in range(repeats):
                for view in views:
                    read(view)

        for _ in range(3):
            timed(device, call)
        # In turns, so that what else the machine does is spread over all of them.
        measured = {background: Beside([], 0.0, 0, 0) for background in BACKGROUNDS}
        for _ in range(rounds):
            for background, sums in measured.items():
                with running(rows, background):
                    before, began = rows.space.stats(), time.perf_counter()
                    sums.ms.extend(timed(device, call) for _ in range(3))
                    sums.seconds += time.perf_counter() - began
                    after = rows.space.stats()
                sums.pages += after["pages_mapped"] - before["pages_mapped"]
                sums.unmaps += after["unmap_calls"] - before["unmap_calls"]
        alone = median(measured[BACKGROUNDS[0]].ms)
        for background, sums in measured.items():
            ms = median(sums.ms)
            per_second = sums.unmaps / sums.seconds
            row: Row = {
                "part": "beside",
                "case": background.name,
                "page_bytes": rows.space.page_bytes,
                "ms": ms,
                "slowdown": ms / alone,
                "pages_mapped_per_s": sums.pages / sums.seconds,
                "unmap_calls_per_s": per_second,
                "spread": {"ms": quartile_spread(sums.ms)},
                "raw": {"ms": sums.ms},
            }
            if device == "cuda" and per_second:  # what a second of reading lost, over the calls in it
                row["stall_us_per_unmap_call"] = (1 - alone / ms) * 1e6 / per_second
            yield row


def layout(device: str, rounds: int, small: bool) -> Iterator[Row]:
    """GB/s of reading one layer after the other, from both layouts."""
    layers, tokens = LAYERS[device], READ_TOKENS[device] // (4 if small else 1)
    if device == "cuda":
        tokens //= 2  # 256 Ki tokens of 128 KiB: 32 GiB
    read = reader(device)
    with closing(Rows(device, tokens, layers)) as rows:
        layers_of = {"sliced": rows.sliced, "layered": rows.layered}
        raw: dict[str, list[float]] = {name: [] for name in layers_of}
        for number in range(rounds + 1):
            for name, view in layers_of.items():
                views = [view(layer) for layer in range(layers)]
                ms = timed(device, lambda views=views: [read(one) for one in views])  # type: ignore[misc]
                if number:  # the first warms up
                    raw[name].append(ms)
        for name, values in raw.items():
            yield {
                "part": "layout",
                "case": name,
                "page_bytes": rows.space.page_bytes,
                "ms": median(values),
                "gb_per_s": layers * tokens * WIDTH * ITEM / median(values) / 1e6,
                "spread": {"ms": spread(values)},
                "raw": {"ms": values},
            }
