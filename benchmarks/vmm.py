# SPDX-License-Identifier: Apache-2.0
"""What the virtual-memory calls cost on the machine at hand: what the design rests on.

    python -m benchmarks.vmm                     # host: memfd and mmap
    python -m benchmarks.vmm --device cuda       # GPU: cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap

``calls``     microseconds a page of creating the pool, of mapping pages into a row and of unmapping rows, by page
              size and by pages a call, as the plugin's own core does them
``parts``     (GPU) the same by single calls of the driver, without the core
``beside``    what mapping and unmapping in the background costs a memory-bound read that runs meanwhile
``layout``    one layer's K and V read from pages of all layers (sliced, ours) and of one layer (layered), both from
              the same pages in random physical order
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.common import RESULTS, ResultFile, Row, median, quartile_spread
from sglang_vattn import _core

KIB, MIB = 1 << 10, 1 << 20
PAGE_SIZES = {"cpu": (4 * KIB, 64 * KIB, 2 * MIB), "cuda": (2 * MIB, 16 * MIB, 64 * MIB)}
POOL_BYTES = {"cpu": 256 * MIB, "cuda": 16 << 30}
PAGES_A_ROW = (1, 8, 64)
MOST_PAGES = 4096
WAIT_S = 60.0


def open_driver(device: str) -> _core.Driver:
    return _core.CudaDriver(0) if device == "cuda" else _core.HostDriver()


def pool_pages(device: str, page_bytes: int, small: bool) -> int:
    return min(POOL_BYTES[device] // (8 if small else 1) // page_bytes, MOST_PAGES)


def shuffled(num_pages: int) -> list[int]:
    """Physical pages as after a long run."""
    pages = list(range(1, num_pages + 1))
    random.Random(0).shuffle(pages)
    return pages


def calls(device: str, page_bytes: int, rounds: int, small: bool) -> Iterator[Row]:
    """The cost of the pool's start, then of rows of 1, 8 and 64 pages."""
    num_pages = pool_pages(device, page_bytes, small)
    start_us = []
    for _ in range(3):
        began = time.perf_counter()
        space = _core.AddressSpace(open_driver(device), num_pages, page_bytes, 2, 1)
        start_us.append((time.perf_counter() - began) / num_pages * 1e6)
        space.close()
    yield _row("start", page_bytes, num_pages, us_per_page=start_us)
    for in_row in PAGES_A_ROW:
        num_rows = min(64, num_pages // in_row)
        if num_rows == 0:
            continue
        with closing(_core.AddressSpace(open_driver(device), num_pages, page_bytes, num_rows + 1, in_row)) as space:
            yield from _map_and_unmap(space, in_row, num_rows, rounds)


def _map_and_unmap(space: _core.AddressSpace, in_row: int, num_rows: int, rounds: int) -> Iterator[Row]:
    pages = shuffled(space.num_pages)
    map_us, visible_us, unmap_us, unmap_call_us = [], [], [], []
    for _ in range(rounds):
        before = space.stats()
        rows = [space.acquire_row() for _ in range(num_rows)]
        assert all(rows), "a row short"
        for number, row in enumerate(rows):
            began = time.perf_counter()
            space.map(row, 0, pages[number * in_row : (number + 1) * in_row])
            assert space.wait(row, in_row, WAIT_S), space.error(row)
            visible_us.append((time.perf_counter() - began) * 1e6)
        mapped = space.stats()
        for row in rows:
            space.retire_row(row)
        space.clean()
        assert space.drain(WAIT_S)
        after = space.stats()
        count = num_rows * in_row
        map_us.append((mapped["map_ns"] - before["map_ns"]) / 1e3 / count)
        unmap_ns = after["unmap_ns"] - before["unmap_ns"]
        unmap_us.append(unmap_ns / 1e3 / count)
        unmap_call_us.append(unmap_ns / 1e3 / max(1, after["unmap_calls"] - before["unmap_calls"]))
    common = (space.page_bytes, space.num_pages)
    yield _row("map", *common, in_row, us_per_page=map_us, us_until_ready=visible_us)
    yield _row("unmap", *common, in_row, us_per_page=unmap_us, us_per_call=unmap_call_us)


def _row(call: str, page_bytes: int, num_pages: int, in_row: int = 0, **raw: list[float]) -> Row:
    return {
        "part": "calls",
        "case": f"{call}, {page_bytes // KIB} KiB" + (f", {in_row} a row" if in_row else ""),
        "call": call,
        "page_bytes": page_bytes,
        "num_pages": num_pages,
        "pages_a_row": in_row,
        **{name: median(values) for name, values in raw.items()},
        "spread": {name: quartile_spread(values) for name, values in raw.items()},
        "raw": raw,
    }


def format_row(row: Row) -> str:
    skip = {"part", "case", "spread", "raw", "call", "page_bytes", "num_pages", "pages_a_row"}
    numbers = "  ".join(
        f"{name} {value:.4g}" for name, value in row.items() if name not in skip and isinstance(value, int | float)
    )
    return f"{row['part']:<7} {row['case']:<44} {numbers}"


def measure(args: argparse.Namespace, results: ResultFile) -> Iterator[Row]:
    rounds = args.rounds or (3 if args.small else 7)
    device: str = args.device
    if "calls" in args.parts:
        for page_bytes in PAGE_SIZES[device]:
            if not results.has(part="calls", case=f"start, {page_bytes // KIB} KiB"):
                yield from calls(device, page_bytes, rounds, args.small)
    if "parts" in args.parts and device == "cuda":
        from benchmarks.vmm_parts import parts

        for page_bytes in PAGE_SIZES[device]:
            yield from parts(page_bytes, rounds)
    if "beside" in args.parts or "layout" in args.parts:
        from benchmarks import vmm_load

        if "beside" in args.parts:
            yield from vmm_load.beside(device, rounds, args.small)
        if "layout" in args.parts:
            yield from vmm_load.layout(device, rounds, args.small)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parts", nargs="+", default=["calls", "parts", "beside", "layout"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--small", action="store_true", help="less memory, fewer rounds")
    args = parser.parse_args()
    out = args.out or RESULTS / {"cpu": "cpu", "cuda": "h200"}[args.device] / "vmm.json"
    results = ResultFile(out, "vmm", ["part", "case"], device=args.device, resume=args.resume)
    for row in measure(args, results):
        results.add(row)
        print(format_row(row), flush=True)


if __name__ == "__main__":
    main()
