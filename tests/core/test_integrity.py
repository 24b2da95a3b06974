# SPDX-License-Identifier: Apache-2.0
"""check_integrity() must see what is wrong: here memory is really damaged, with libc."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest

from sglang_vattn._core import AddressSpace
from tests.core.support import PAGE_BYTES, ROW_PAGES, make_space, memfd_lines

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

PROT_NONE, MAP_FIXED, MREMAP_MAYMOVE, MREMAP_FIXED = 0, 0x10, 1, 2
MAP_FAILED = ctypes.c_void_p(-1).value


def put_foreign(at: int, size: int = PAGE_BYTES) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    assert libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == at


def put_nothing(at: int, size: int = PAGE_BYTES) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    assert libc.mmap(at, size, PROT_NONE, flags, -1, 0) == at


def put_alias(at: int, of: int, size: int = PAGE_BYTES) -> None:
    """Maps at `at` a second time what lies at `of` (old size 0: mremap duplicates)."""
    assert libc.mremap(of, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) == at


def close_access(at: int) -> None:
    assert libc.mprotect(at, PAGE_BYTES, PROT_NONE) == 0


@pytest.fixture
def space() -> AddressSpace:
    """Row 1 holds pages 5, 3, 4."""
    space = make_space()
    row = space.acquire_row()
    assert row == 1
    space.map(row, 0, [5, 3, 4])
    assert space.wait(row, 3, 10)
    assert space.check_integrity() == []
    return space


def row_page(space: AddressSpace, row: int, page: int) -> int:
    return space.rows_address + (row * ROW_PAGES + page) * PAGE_BYTES


@pytest.mark.parametrize(
    ("damage", "report"),
    [
        (lambda s: put_foreign(row_page(s, 1, 1)), "row 1, page 1: expected page 3, found something that is not"),
        (lambda s: put_nothing(row_page(s, 1, 2)), "row 1, page 2: expected page 4, found nothing"),
        (lambda s: close_access(row_page(s, 1, 0)), "row 1, page 0: expected page 5, found page 5, not accessible"),
        (
            lambda s: put_alias(row_page(s, 1, 0), s.home_address + 7 * PAGE_BYTES),
            "row 1, page 0: expected page 5, found page 7",
        ),
        (
            lambda s: put_alias(row_page(s, 3, 6), s.home_address + 7 * PAGE_BYTES),
            "row 3, page 6: expected nothing, found page 7",
        ),
        (lambda s: put_foreign(row_page(s, 4, 0)), "row 4, page 0: expected nothing, found something"),
        (lambda s: put_nothing(row_page(s, 0, 0)), "row 0, page 0: expected page 0, found nothing"),
        (lambda s: put_nothing(s.home_address + 9 * PAGE_BYTES), "home page 9: expected page 9, found nothing"),
        (lambda s: put_foreign(s.home_address), "home page 0: expected page 0, found something"),
    ],
)
def test_damage_is_seen(space: AddressSpace, damage: Callable[[AddressSpace], None], report: str) -> None:
    damage(space)
    found = space.check_integrity()
    assert len(found) == 1
    assert found[0].startswith(report)


def test_a_torn_page_is_seen() -> None:
    """Only the last system page of a larger page is lost."""
    space = make_space(page_bytes=4 * PAGE_BYTES)
    put_nothing(space.home_address + 4 * 4 * PAGE_BYTES - PAGE_BYTES)
    (report,) = space.check_integrity()
    assert report == "home page 3: expected page 3, found something that is not one of our pages"


def test_another_space_is_not_ours(space: AddressSpace) -> None:
    other = make_space()
    put_alias(row_page(space, 1, 1), other.home_address + 3 * PAGE_BYTES)  # page 3, but theirs
    assert len(space.check_integrity()) == 1
    assert other.check_integrity() == []
    del other
    assert memfd_lines()
