# SPDX-License-Identifier: Apache-2.0
"""Failing and slow drivers (csrc/tests/test_faults.cpp walks every call and every k).

What must hold, whatever fails: the records agree with /proc/self/maps, ready()
counts only what is really there, and the next attempt works.
"""

from __future__ import annotations

import threading
import time

import pytest

from sglang_vattn._core import DriverError
from tests.core.support import (
    PAGE_BYTES,
    faulty,
    make_space,
    memfd_lines,
    number_pages,
    read_row,
)

CALLS_OF_THE_CONSTRUCTOR = {"reserve": 2, "create": 1, "map": 3, "set_access": 2, "write": 6, "read": 6}


@pytest.mark.parametrize(("call", "k"), [(c, k) for c, n in CALLS_OF_THE_CONSTRUCTOR.items() for k in range(1, n + 1)])
def test_constructor_gives_everything_back(call: str, k: int) -> None:
    driver = faulty()
    driver.fail_at(call, k)
    with pytest.raises(DriverError, match=f"{call}: injected fault"):
        make_space(driver, dummy_row_pages=2)
    assert memfd_lines() == []
    space = make_space(driver, dummy_row_pages=2)
    assert space.check_integrity() == []
    assert driver.calls()[call] == k + CALLS_OF_THE_CONSTRUCTOR[call]


@pytest.mark.parametrize(("call", "k"), [("map", 1), ("map", 2), ("map", 3), ("set_access", 1)])
def test_failed_map_is_rolled_back_and_can_be_retried(call: str, k: int) -> None:
    driver = faulty()
    space = make_space(driver)
    number_pages(space)
    row = space.acquire_row()
    space.map(row, 0, [2])
    assert space.wait(row, 1, 10)
    driver.fail_at(call, k)
    space.map(row, 1, [9, 7, 5])  # three runs
    assert not space.wait(row, 4, 10)
    assert space.error(row) == f"{call}: injected fault"
    assert read_row(space, row) == [2]
    assert space.stats()["mappings"] == 1
    assert space.check_integrity() == []
    other = space.acquire_row()  # another row is not touched by it
    space.map(other, 0, [9, 7])
    assert space.wait(other, 2, 10)
    space.map(row, 4, [1])  # wanted, but not tried while the error stands
    assert not space.wait(row, 5, 10)
    space.truncate(row, space.ready(row))
    assert space.error(row) == ""
    space.map(row, 1, [9, 7, 5])
    assert space.wait(row, 4, 10)
    assert read_row(space, row) == [2, 9, 7, 5]
    assert space.check_integrity() == []


def test_a_row_with_an_error_can_be_retired() -> None:
    driver = faulty()
    space = make_space(driver)
    row = space.acquire_row()
    driver.fail_at("map", 2)
    space.map(row, 0, [1, 3])
    assert not space.wait(row, 2, 10)
    space.retire_row(row)
    assert space.drain(10)
    assert (space.error(row), space.stats()["rows_clean"], space.stats()["errors"]) == ("", 5, 1)
    assert space.check_integrity() == []


def test_failed_truncate_keeps_the_prefix_right() -> None:
    driver = faulty()
    space = make_space(driver)
    number_pages(space)
    row = space.acquire_row()
    space.map(row, 0, [1, 2, 3])
    assert space.wait(row, 3, 10)
    driver.fail_at("unmap", 1)
    space.truncate(row, 1)
    space.map(row, 1, [8])
    assert not space.wait(row, 2, 10)
    assert "unmap" in space.error(row)
    assert read_row(space, row) == [1]  # [1, 3] are still mapped, and known to be
    assert space.check_integrity() == []
    space.truncate(row, 1)
    space.map(row, 1, [8])
    assert space.wait(row, 2, 10)
    assert read_row(space, row) == [1, 8]


def test_failed_clean_is_retried_on_request() -> None:
    driver = faulty()
    space = make_space(driver)
    row = space.acquire_row()
    space.map(row, 0, [1, 2])
    assert space.wait(row, 2, 10)
    driver.fail_at("unmap", 1)
    space.retire_row(row)
    assert space.drain(10)
    assert (space.stats()["rows_retired"], space.stats()["errors"]) == (1, 1)
    assert space.check_integrity() == []
    space.clean()
    assert space.drain(10)
    assert (space.stats()["rows_clean"], space.stats()["mappings"]) == (5, 0)


def test_close_tells_the_first_failure_but_goes_on() -> None:
    driver = faulty()
    space = make_space(driver)
    driver.fail_at("unmap", 1)
    with pytest.raises(DriverError, match="unmap: injected fault"):
        space.close()
    assert memfd_lines() == []
    space.close()


def test_the_faulty_driver_knows_its_calls() -> None:
    driver = faulty()
    with pytest.raises(ValueError, match="no call named"):
        driver.fail_at("mapp", 1)
    driver.fail_at("", 1)
    assert driver.armed
    with pytest.raises(DriverError, match="create: injected fault"):
        make_space(driver)
    assert not driver.armed
    assert (driver.name, driver.granularity, driver.device) == ("host", PAGE_BYTES, -1)


# ---- a slow driver ---------------------------------------------------------------------


def test_no_call_waits_for_the_driver() -> None:
    driver = faulty()
    space = make_space(driver)
    rows = [space.acquire_row() for _ in range(3)]
    driver.set_delay("map", 2)
    space.map(rows[0], 0, [1])
    time.sleep(0.05)  # now the thread is in the driver
    begin = time.perf_counter()
    space.map(rows[1], 0, [1, 2])
    space.truncate(rows[1], 1)
    space.prefer(rows)
    space.retire_row(rows[2])
    assert space.acquire_row() != 0
    assert space.ready(rows[0]) == 0
    assert space.stats()["queued_jobs"] == 2
    assert not space.wait(rows[0], 1, 0)
    assert time.perf_counter() - begin < 1.5
    driver.set_delay("map", 0)
    assert space.drain(10)
    assert space.ready(rows[1]) == 1


def test_wait_times_out_and_releases_the_gil() -> None:
    driver = faulty()
    space = make_space(driver)
    row = space.acquire_row()
    driver.set_delay("map", 1)
    space.map(row, 0, [1])
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.005):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.perf_counter()
    assert not space.wait(row, 1, 0.1)
    assert 0.09 < time.perf_counter() - begin < 0.9
    assert space.wait(row, 1, 10)
    stop.set()
    ticker.join()
    assert ticks > 5
    stats = space.stats()
    assert stats["waits"] == 2
    assert stats["wait_ns"] > 0.5e9


def completion_order(urge: str) -> list[int] | None:
    """Five rows queued behind a slow map; the last but one is urged. Who is ready first?

    None if this thread was held up so long that it cannot tell.
    """
    driver = faulty()
    space = make_space(driver, num_rows=8)
    blocker, *rows = [space.acquire_row() for _ in range(6)]
    driver.set_delay("map", 0.1)
    space.map(blocker, 0, [1])
    while driver.calls().get("map", 0) == 0:  # the others must find it at work
        time.sleep(0.001)
    for row in rows:
        space.map(row, 0, [2])
    urged = rows[3]
    if urge == "prefer":
        space.prefer([urged])
    in_time = space.ready(blocker) == 0
    if urge == "wait":
        space.wait(urged, 1, 10)
    order: list[int] = []
    deadline = time.perf_counter() + 10
    while len(order) < len(rows) and time.perf_counter() < deadline:
        new = [row for row in rows if row not in order and space.ready(row)]
        in_time = in_time and len(new) <= 1
        order += new
        time.sleep(0.002)
    return [rows.index(row) for row in order] if in_time else None


@pytest.mark.parametrize(
    ("urge", "order"), [("", [0, 1, 2, 3, 4]), ("prefer", [3, 0, 1, 2, 4]), ("wait", [3, 0, 1, 2, 4])]
)
def test_order_is_first_come_first_served_but_for_who_is_urgent(urge: str, order: list[int]) -> None:
    seen = (completion_order(urge) for _ in range(20))
    assert next(found for found in seen if found is not None) == order


def test_an_urgent_row_cuts_into_a_long_map() -> None:
    driver = faulty()
    space = make_space(driver, num_pages=300, pages_per_row=256, num_rows=4)
    long, short = space.acquire_row(), space.acquire_row()
    driver.set_delay("map", 0.02)
    space.map(long, 0, list(range(1, 257)))  # eight chunks
    space.map(short, 0, [5])
    assert space.wait(short, 1, 10)
    assert space.ready(long) < 256
    assert space.drain(10)
    assert space.ready(long) == 256


def test_retire_drops_what_is_queued() -> None:
    driver = faulty()
    space = make_space(driver)
    number_pages(space)
    a, b = space.acquire_row(), space.acquire_row()
    driver.set_delay("map", 0.05)
    space.map(a, 0, [1, 3, 5])
    space.map(b, 0, [2, 4, 6])
    time.sleep(0.02)  # a is in the driver's hands, b still waits
    space.retire_row(a)
    space.retire_row(b)
    assert (space.ready(a), space.ready(b), space.row_pages(a)) == (0, 0, [])
    assert space.drain(10)
    assert driver.calls()["map"] == 2 + 3  # home, dummy row, and a's three runs
    stats = space.stats()
    assert (stats["rows_clean"], stats["mappings"]) == (5, 0)
    assert space.check_integrity() == []


def test_truncate_under_a_map_in_flight() -> None:
    driver = faulty()
    space = make_space(driver)
    number_pages(space)
    row = space.acquire_row()
    driver.set_delay("map", 0.03)
    space.map(row, 0, [1, 3, 5])
    time.sleep(0.02)  # all three are in the driver's hands
    space.truncate(row, 1)
    space.map(row, 1, [7])
    have: list[int] = []
    while len(have) < 2:  # whatever ready() says at any moment is right
        have = read_row(space, row)
        assert have == [1, 7][: len(have)]
    assert space.drain(10)
    assert space.row_pages(row) == [1, 7]
    assert space.check_integrity() == []
