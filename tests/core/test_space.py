# SPDX-License-Identifier: Apache-2.0
"""AddressSpace on the host driver, through real memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from sglang_vattn._core import AddressSpace, DriverError, HostDriver
from tests.core.support import (
    NUM_PAGES,
    PAGE_BYTES,
    ROW_PAGES,
    faulty,
    home_pages,
    make_space,
    memfd_lines,
    number_pages,
    read_row,
    row_view,
)


@pytest.mark.parametrize(("granule", "pages_a_granule"), [(4096, 1), (4096, 3), (2 << 20, 1)])
def test_rows_and_home_are_the_same_memory(granule: int, pages_a_granule: int) -> None:
    space = make_space(HostDriver(granule), page_bytes=granule * pages_a_granule)
    number_pages(space)
    a, b = space.acquire_row(), space.acquire_row()
    space.map(a, 0, [5, 3, 9])
    space.map(b, 0, [5, 3])
    space.map(b, 2, [1, 2, space.guard_page])
    assert space.wait(a, 3, 10)
    assert space.wait(b, 5, 10)
    assert read_row(space, a) == [5, 3, 9]
    assert read_row(space, b) == [5, 3, 1, 2, 0]
    row_view(space)[a, 1, -1] = 77
    assert home_pages(space)[3, -1] == row_view(space)[b, 1, -1] == 77
    assert space.check_integrity() == []


def test_everything_is_zero_at_first_and_the_self_check_leaves_no_trace() -> None:
    space = make_space(dummy_row_pages=3)
    assert not home_pages(space).any()
    assert not row_view(space)[0, :3].any()
    assert (space.ready(0), space.row_pages(0)) == (3, [0, 0, 0])
    row_view(space)[0, 2, 5] = 9
    assert home_pages(space)[0, 5] == row_view(space)[0, 0, 5] == 9


def test_torch_reads_it_too() -> None:
    torch = pytest.importorskip("torch")
    space = make_space()
    row = space.acquire_row()
    space.map(row, 0, [4])
    assert space.wait(row, 1, 10)
    torch.from_dlpack(space.home())[4 * PAGE_BYTES] = 5
    view = torch.from_dlpack(space.rows()).view(6, ROW_PAGES, PAGE_BYTES)
    assert view[row, 0, 0] == 5
    assert view.device.type == "cpu"


def test_sharing_is_one_physical_page_at_many_addresses() -> None:
    """/proc/self/maps shows page 5's place in the file at home and in both rows."""
    space = make_space()
    rows = [space.acquire_row(), space.acquire_row()]
    for row in rows:
        space.map(row, 0, [5])
        assert space.wait(row, 1, 10)
    addresses = [int(line.split("-")[0], 16) for line in memfd_lines() if int(line.split()[2], 16) == 5 * PAGE_BYTES]
    row_bytes = ROW_PAGES * PAGE_BYTES
    assert addresses == sorted(space.rows_address + row * row_bytes for row in rows)
    home = [line for line in memfd_lines() if line.startswith(f"{space.home_address:x}-")]
    assert len(home) == 1  # merged: one mmap for the whole arena
    assert f"-{space.home_address + space.physical_bytes:x} " in home[0]


def test_truncate_then_map_replaces_the_tail() -> None:
    space = make_space()
    number_pages(space)
    row = space.acquire_row()
    space.map(row, 0, [1, 2, 3, 4])
    assert space.wait(row, 4, 10)
    space.truncate(row, 2)
    assert space.ready(row) == 2
    space.map(row, 2, [7, 8, 9])
    assert space.row_pages(row) == [1, 2, 7, 8, 9]
    assert space.wait(row, 5, 10)
    assert read_row(space, row) == [1, 2, 7, 8, 9]
    stats = space.stats()
    assert (stats["unmap_calls"], stats["pages_unmapped"], stats["mappings"]) == (1, 2, 5)
    assert space.check_integrity() == []


def test_a_long_map_is_one_call_a_run_and_one_access_call_a_chunk() -> None:
    space = make_space(num_pages=100, pages_per_row=100)
    row = space.acquire_row()
    space.map(row, 0, list(range(1, 65)))
    assert space.wait(row, 64, 10)
    stats = space.stats()
    assert (stats["map_calls"], stats["pages_mapped"], stats["set_access_calls"]) == (2, 64, 2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"page_bytes": 6000}, "6000.*4096"),
        ({"page_bytes": 0}, "page_bytes"),
        ({"num_pages": 0}, "num_pages"),
        ({"num_rows": 1}, "num_rows"),
        ({"pages_per_row": 0}, "pages_per_row"),
        ({"dummy_row_pages": 0}, "dummy_row_pages"),
        ({"dummy_row_pages": ROW_PAGES + 1}, "dummy_row_pages"),
        ({"num_rows": 2**31 - 1, "pages_per_row": 2**62}, "does not fit"),
    ],
)
def test_bad_geometry_is_a_value_error_that_says_why(changes: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_space(None, **changes)


@pytest.mark.parametrize("granule", [0, 1000, 2048, 12288])
def test_bad_granule(granule: int) -> None:
    with pytest.raises(ValueError, match="granule_bytes"):
        HostDriver(granule)


def test_what_does_not_fit_is_a_driver_error_and_leaves_nothing() -> None:
    with pytest.raises(DriverError, match="mmap: ENOMEM"):
        make_space(num_rows=1 << 20, pages_per_row=1 << 20)  # more than any address space
    assert memfd_lines() == []


def test_bad_arguments_change_nothing() -> None:
    space = make_space()
    row = space.acquire_row()
    space.map(row, 0, [1, 2])
    assert space.wait(row, 2, 10)
    other = 5
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: space.map(row, 1, [3]), "grow at their end"),
        (lambda: space.map(row, 3, [3]), "grow at their end"),
        (lambda: space.map(row, -1, [3]), "grow at their end"),
        (lambda: space.map(row, 2, [3, NUM_PAGES + 2]), "not in 0..17"),
        (lambda: space.map(row, 2, [-1]), "not in 0..17"),
        (lambda: space.map(row, 2, [1] * (ROW_PAGES - 1)), "would hold 9 pages of 8"),
        (lambda: space.map(other, 0, [1]), "not live"),
        (lambda: space.map(0, 0, [1]), "dummy row"),
        (lambda: space.map(6, 0, [1]), "not in 0..5"),
        (lambda: space.truncate(row, 3), "holds 2 pages"),
        (lambda: space.truncate(row, -1), "holds 2 pages"),
        (lambda: space.retire_row(0), "dummy row"),
        (lambda: space.retire_row(other), "not live"),
        (lambda: space.ready(-1), "not in 0..5"),
        (lambda: space.wait(17, 1, 0), "not in 0..5"),
        (lambda: space.prefer([row, 99]), "not in 0..5"),
    ]
    for call, match in refused:
        with pytest.raises(ValueError, match=match):
            call()
    assert space.row_pages(row) == [1, 2]
    assert space.check_integrity() == []


def test_rows_are_used_up_and_come_back_clean() -> None:
    space = make_space()
    rows = [space.acquire_row() for _ in range(5)]
    assert sorted(rows) == [1, 2, 3, 4, 5]
    assert space.acquire_row() == 0
    for row in rows:
        space.map(row, 0, [row, row])
        assert space.wait(row, 2, 10)
        space.retire_row(row)
    assert space.drain(10)
    stats = space.stats()
    assert (stats["rows_clean"], stats["rows_live"], stats["rows_retired"], stats["mappings"]) == (5, 0, 0, 0)
    assert stats["unmap_calls"] == 5  # one a row
    assert space.acquire_row() != 0
    assert space.check_integrity() == []


def test_budget_of_mappings() -> None:
    """Beyond max_mappings rows wait; they go on when others are unmapped."""
    space = make_space(max_mappings=5)
    number_pages(space)
    a, b = space.acquire_row(), space.acquire_row()
    space.map(a, 0, [1, 2, 3])
    assert space.wait(a, 3, 10)
    space.map(b, 0, [4, 5, 6, 7])
    assert not space.wait(b, 4, 0.05)
    assert (space.ready(b), space.stats()["mappings"], space.error(b)) == (2, 5, "")
    assert not space.drain(0.01)
    space.retire_row(a)
    assert space.wait(b, 4, 10)
    assert read_row(space, b) == [4, 5, 6, 7]
    assert space.check_integrity() == []


def test_close_is_final_and_idempotent() -> None:
    space = make_space()
    row = space.acquire_row()
    space.map(row, 0, [1, 2])
    assert space.wait(row, 2, 10)
    assert memfd_lines()
    space.close()
    space.close()
    assert memfd_lines() == []
    for call in (space.acquire_row, space.home, space.rows, space.stats, space.check_integrity, space.clean):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_view_keeps_the_space_alive() -> None:
    array = np.from_dlpack(make_space().home())
    gc.collect()
    array[:] = 3
    assert memfd_lines()
    del array
    gc.collect()
    assert memfd_lines() == []


def test_close_wakes_who_waits() -> None:
    driver = faulty()
    space = make_space(driver)
    driver.set_delay("map", 0.2)
    row = space.acquire_row()
    space.map(row, 0, [1])
    space.map(row, 1, [3])
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(space.wait(row, 3, 60)))
    waiter.start()
    time.sleep(0.02)
    space.close()
    waiter.join(10)
    assert answers == [False]


@pytest.mark.parametrize("ending", ["pass", "space.close()", "del space", "import os; os.fork() or os._exit(0)"])
def test_the_interpreter_exits_cleanly_with_the_thread_at_work(ending: str) -> None:
    code = f"""
from sglang_vattn._core import AddressSpace, FaultyDriver, HostDriver
driver = FaultyDriver(HostDriver())
space = AddressSpace(driver, 64, 4096, 4, 64)
driver.set_delay("map", 0.01)
row = space.acquire_row()
space.map(row, 0, [1, 3] * 30)
view = space.home()
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_many_terabytes_of_addresses_cost_nothing() -> None:
    space = AddressSpace(HostDriver(2 << 20), 2, 2 << 20, num_rows=2048, pages_per_row=4096)  # 16 TiB
    row = [space.acquire_row() for _ in range(2047)][-1]
    space.map(row, 0, [1, 2])
    assert space.wait(row, 2, 10)
    assert np.from_dlpack(space.rows()).shape == (2048 * 4096 * (2 << 20),)
    assert space.check_integrity() == []
