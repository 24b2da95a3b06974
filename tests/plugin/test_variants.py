# SPDX-License-Identifier: Apache-2.0
"""Which decode graphs are captured, and that the log tells what each variant took."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang_vattn import building
from sglang_vattn.attention.variants import PAGED, ROWS, SHARED, RowGraphVariants
from sglang_vattn.reading import LEAST_BATCH, Reading


@pytest.mark.parametrize(("rows", "share"), [(True, True), (True, False), (False, False)])
def test_each_variant_is_captured_where_it_can_be_chosen(
    rows: bool, share: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter(range(1 << 30, 0, -(1 << 20)))  # each look finds one MiB less
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 1 << 30))
    reading: Any = SimpleNamespace(rows_possible=rows, share_possible=share, share=share, mode="auto")
    variants = RowGraphVariants(reading)
    runner = SimpleNamespace(attention_graph_variants=variants, capture_bs=[1, 4, LEAST_BATCH, 32])
    captured = []

    def original(self: Any, size: int, forward: Any, stream: Any, lora: Any, variant: str) -> None:
        captured.append((size, variant))

    with caplog.at_level(logging.INFO):
        for size in reversed(runner.capture_bs):  # in SGLang's order
            for variant in variants.capture_labels:
                building.capture_one_shape(original, runner, size, None, None, None, variant)
    wanted = {PAGED: True, ROWS: rows, SHARED: share}
    assert set(captured) == {
        (size, variant)
        for variant, on in wanted.items()
        for size in runner.capture_bs
        if on and (variant != SHARED or size >= LEAST_BATCH)
    }
    (line,) = [record.getMessage() for record in caplog.records if "decode graphs" in record.getMessage()]
    assert f"{PAGED} 4 in " in line
    assert ", 4 MiB" in line
    assert (f"{SHARED} 2 in " in line) == share


def test_without_variants_of_ours_every_graph_is_captured() -> None:
    runner = SimpleNamespace(attention_graph_variants=None, capture_bs=[1])
    assert building.capture_one_shape(lambda self, size, forward: size, runner, 1, None) == 1


def test_a_long_hit_gets_no_row_at_first_only_where_pages_are_read_as_fast() -> None:
    """On the host a first forward by pages took ten times as long as one by rows."""
    reading = Reading("auto", cast(Any, None), page_size=128, page_bytes_per_layer=1 << 20, share=True)
    reading.share_possible = True
    hit = cast(Any, SimpleNamespace(shared=reading.least_deferred_pages))
    assert not reading.defers_row(hit)
    reading.pages_as_fast = True
    assert reading.defers_row(hit)
