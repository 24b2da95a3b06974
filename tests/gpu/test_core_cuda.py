# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver: pages, aliases, rows, shortage, through real memory."""

from __future__ import annotations

import os

import pytest
import torch

from sglang_vattn import _core

MIB = 1 << 20
STRESS_ROUNDS = int(os.environ.get("VATTN_STRESS_ROUNDS", "100"))  # ten for a sanitizer


def open_space(**kw: int) -> _core.AddressSpace:
    arguments = {"num_pages": 32, "page_bytes": 4 * MIB, "num_rows": 16, "pages_per_row": 8} | kw
    return _core.AddressSpace(_core.CudaDriver(0), **arguments)


def views(space: _core.AddressSpace) -> tuple[torch.Tensor, torch.Tensor]:
    """Home arena as (pages, words) and rows as (rows, pages, words), int64."""
    words = space.page_bytes // 8
    home = torch.from_dlpack(space.home()).view(torch.int64).view(-1, words)
    rows = torch.from_dlpack(space.rows()).view(torch.int64).view(space.num_rows, space.pages_per_row, words)
    return home, rows


def test_a_write_by_home_slot_is_read_in_every_row() -> None:
    space = open_space()
    home, rows = views(space)
    assert home.shape[0] == space.num_pages + 2 and not home.any().item(), "pages are zeroed"
    first, second = space.acquire_row(), space.acquire_row()
    space.map(first, 0, [3, 4, 5])
    space.map(second, 0, [3, 9])
    assert space.wait(first, 3, 10) and space.wait(second, 2, 10)
    for page in (3, 4, 5, 9):
        home[page] = torch.arange(home.shape[1], device="cuda") * (page + 1)
    for index, page in enumerate((3, 4, 5)):
        assert torch.equal(rows[first, index], home[page])
    assert torch.equal(rows[second, 0], home[3]) and torch.equal(rows[second, 1], home[9])
    assert space.check_integrity() == []
    space.close()


def test_a_retired_row_comes_back_clean() -> None:
    space = open_space(num_rows=3)
    a, b = space.acquire_row(), space.acquire_row()
    assert space.acquire_row() == 0
    space.map(a, 0, [1, 2, 3])
    assert space.wait(a, 3, 10)
    space.retire_row(a)
    space.clean()
    assert space.drain(10)
    assert space.acquire_row() == a and space.row_pages(a) == []
    assert b and space.check_integrity() == [] and space.stats()["unmap_calls"] == 1
    space.close()


def test_closing_gives_all_memory_back() -> None:
    torch.cuda.init()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    space = open_space(num_pages=512)
    during = torch.cuda.mem_get_info()[0]
    assert before - during >= 514 * 4 * MIB
    space.close()
    assert torch.cuda.mem_get_info()[0] >= before - 16 * MIB


def test_more_than_the_memory_is_an_error_by_name_and_leaks_nothing() -> None:
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(_core.DriverError, match="OUT_OF_MEMORY"):
        open_space(num_pages=free // (64 * MIB) + 64, page_bytes=64 * MIB)
    assert torch.cuda.mem_get_info()[0] >= free - 64 * MIB


def test_stripes_are_apart_and_each_the_same_memory_at_both_addresses() -> None:
    space = _core.AddressSpace(_core.StripedDriver(_core.CudaDriver(0), 2), 8, 2 * MIB, 4, 8)
    home = torch.from_dlpack(space.home()).view(2, 10, -1)
    rows = torch.from_dlpack(space.rows()).view(2, 4, 8, -1)
    row = space.acquire_row()
    space.map(row, 0, [5, 3, 6])
    assert space.wait(row, 3, 10), space.error(row)
    home[0, 5], home[1, 5], home[1, 3] = 1, 2, 3
    assert [int(rows[stripe, row, index, -1]) for stripe, index in ((0, 0), (1, 0), (1, 1), (0, 1))] == [1, 2, 3, 0]
    assert space.check_integrity() == [] and space.physical_bytes == 40 * MIB
    space.close()


def test_a_torn_page_is_refused() -> None:
    with pytest.raises(ValueError, match="3145728.*2097152"):
        open_space(page_bytes=3 * MIB)


def test_mapping_a_neighbour_row_under_a_running_kernel() -> None:
    """Report 18: map and unmap beside a long-running kernel, thousands of times, must not disturb it."""
    space = open_space(num_pages=64, num_rows=64)
    home, rows = views(space)
    home[1:65] = torch.arange(1, 65, device="cuda")[:, None]
    reader = space.acquire_row()
    space.map(reader, 0, list(range(1, 9)))
    assert space.wait(reader, 8, 10)
    expected = sum(range(1, 9)) * home.shape[1]
    stream = torch.cuda.Stream()
    sums = []
    for round_ in range(STRESS_ROUNDS):
        with torch.cuda.stream(stream):
            sums += [rows[reader].sum() for _ in range(10)]
        for _ in range(10):
            row = space.acquire_row()
            if row:
                space.map(row, 0, [9 + (round_ + i) % 50 for i in range(4)])
                assert space.wait(row, 4, 10)
                space.retire_row(row)
        space.clean()
        assert space.drain(30)
    stream.synchronize()
    assert {int(total) for total in sums} == {expected}
    assert space.check_integrity() == []
    assert space.stats()["unmap_calls"] >= 9 * STRESS_ROUNDS
    space.close()
