# SPDX-License-Identifier: Apache-2.0
"""What the tests of AddressSpace share."""

from __future__ import annotations

import numpy as np

from sglang_vattn._core import AddressSpace, Driver, FaultyDriver, HostDriver

PAGE_BYTES = 4096
NUM_PAGES = 16
ROW_PAGES = 8


def make_space(driver: Driver | None = None, **changes: int) -> AddressSpace:
    config = {"num_pages": NUM_PAGES, "page_bytes": PAGE_BYTES, "num_rows": 6, "pages_per_row": ROW_PAGES}
    return AddressSpace(driver or HostDriver(), **{**config, **changes})


def faulty() -> FaultyDriver:
    return FaultyDriver(HostDriver())


def home_pages(space: AddressSpace) -> np.ndarray:
    """(page, byte)"""
    return np.from_dlpack(space.home()).reshape(-1, space.page_bytes)


def row_view(space: AddressSpace) -> np.ndarray:
    """(row, page, byte)"""
    return np.from_dlpack(space.rows()).reshape(space.num_rows, space.pages_per_row, space.page_bytes)


def number_pages(space: AddressSpace) -> None:
    """Each usable page's bytes are its number: then a row's bytes tell what it maps."""
    home_pages(space)[1:-1] = np.arange(1, space.num_pages + 1, dtype=np.uint8)[:, None]


def read_row(space: AddressSpace, row: int) -> list[int]:
    """The pages of a row that are ready, by their bytes."""
    pages = row_view(space)[row, : space.ready(row)]
    assert (pages == pages[:, :1]).all()
    return [int(page) for page in pages[:, 0]]


def memfd_lines() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "memfd:sglang-vattn" in line]
