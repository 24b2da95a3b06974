# SPDX-License-Identifier: Apache-2.0
"""Pages of several allocations: every stripe does what one allocation would, or none does."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_vattn._core import AddressSpace, DriverError, FaultyDriver, HostDriver, StripedDriver
from tests.core.support import NUM_PAGES, PAGE_BYTES, ROW_PAGES, make_space, memfd_lines

STRIPES = 3


def home_pages(space: AddressSpace) -> np.ndarray:
    """(stripe, page, byte)"""
    return np.from_dlpack(space.home()).reshape(space.stripes, -1, PAGE_BYTES)


def row_view(space: AddressSpace) -> np.ndarray:
    """(stripe, row, page, byte)"""
    return np.from_dlpack(space.rows()).reshape(space.stripes, space.num_rows, ROW_PAGES, PAGE_BYTES)


def test_rows_and_home_are_the_same_memory_in_every_stripe() -> None:
    space = make_space(StripedDriver(HostDriver(), STRIPES))
    assert space.physical_bytes == STRIPES * (NUM_PAGES + 2) * PAGE_BYTES
    home, rows = home_pages(space), row_view(space)
    assert not home.any()
    home[:, 1:-1] = np.arange(STRIPES * NUM_PAGES, dtype=np.uint8).reshape(STRIPES, NUM_PAGES, 1)
    row = space.acquire_row()
    space.map(row, 0, [5, 3, 9])
    assert space.wait(row, 3, 10)
    for index, page in enumerate((5, 3, 9)):
        np.testing.assert_array_equal(rows[:, row, index], home[:, page])
    rows[2, row, 1, -1] = 201
    assert home[2, 3, -1] == 201
    assert (home[:, 3, -1] == 201).sum() == 1
    assert space.check_integrity() == []
    assert space.stats()["mappings"] == 3
    space.truncate(row, 0)
    assert space.drain(10)
    assert space.check_integrity() == []


@pytest.mark.parametrize("call", ["map", "set_access", "unmap"])
@pytest.mark.parametrize("k", range(1, 2 * STRIPES + 1))
def test_a_failure_in_any_stripe_leaves_none_half_done(call: str, k: int) -> None:
    """Pages 5, 3 and 9 are not neighbours: each is a map call in each stripe."""
    inner = FaultyDriver(HostDriver())
    space = make_space(StripedDriver(inner, STRIPES), max_mappings=6)
    inner.fail_at(call, k)
    for _ in range(2):
        row = space.acquire_row()
        space.map(row, 0, [5, 3, 9])
        if not space.wait(row, 3, 0.5):
            assert "injected" in space.error(row)
        assert space.check_integrity() == []
        space.retire_row(row)
        for _ in range(2):  # what failed is tried once more
            space.clean()
            assert space.drain(10)
    assert space.check_integrity() == []
    stats = space.stats()
    assert (stats["mappings"], stats["rows_clean"]) == (0, space.num_rows - 1)
    assert not inner.armed
    space.close()
    assert not memfd_lines()


@pytest.mark.parametrize("call", ["create", "reserve", "map", "set_access", "zero"])
@pytest.mark.parametrize("k", range(1, STRIPES + 1))
def test_a_space_that_cannot_be_built_leaves_nothing(call: str, k: int) -> None:
    inner = FaultyDriver(HostDriver())
    inner.fail_at(call, k)
    try:
        space = make_space(StripedDriver(inner, STRIPES))
    except DriverError:
        assert not inner.armed
    else:  # the call is made less often than k times
        assert inner.armed
        space.close()
    assert not memfd_lines()


def test_no_stripe_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="stripes"):
        StripedDriver(HostDriver(), 0)
