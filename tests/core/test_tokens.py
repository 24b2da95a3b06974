# SPDX-License-Identifier: Apache-2.0
"""common_prefix against the obvious loop, and what it refuses."""

from __future__ import annotations

import time
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_vattn._core import common_prefix

tokens = st.lists(st.integers(0, 1), max_size=40)


@given(tokens, tokens, st.integers(0, 45), st.integers(0, 45))
def test_equals_the_loop(a: list[int], b: list[int], a_start: int, b_start: int) -> None:
    want = 0
    for x, y in zip(a[a_start:], b[b_start:], strict=False):
        if x != y:
            break
        want += 1
    assert common_prefix(array("q", a), array("q", b), a_start, b_start) == want
    assert common_prefix(np.array(a, np.int64), memoryview(array("q", b)), a_start, b_start) == want


@pytest.mark.parametrize(
    "bad",
    [array("i", [1]), np.zeros(3), np.zeros(3, np.uint64), np.arange(8)[::2], [1, 2], "text", b"12345678"],
)
def test_other_items_are_a_type_error(bad: object) -> None:
    good = array("q", [1, 2])
    with pytest.raises(TypeError):
        common_prefix(bad, good)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        common_prefix(good, bad)  # type: ignore[arg-type]


def test_negative_start_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        common_prefix(array("q", [1]), array("q", [1]), -1)


def test_runs_at_memory_speed() -> None:
    a = np.arange(1_000_000)
    b = a.copy()
    b[-1] = -1
    best = min(_timed(a, b) for _ in range(5))
    assert best < 0.02, f"{best * 1e3:.1f} ms for 2 x 8 MB"  # a Python loop takes 50 ms and more


def _timed(a: np.ndarray, b: np.ndarray) -> float:
    begin = time.perf_counter()
    assert common_prefix(a, b) == len(a) - 1
    return time.perf_counter() - begin
