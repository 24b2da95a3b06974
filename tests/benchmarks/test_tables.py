# SPDX-License-Identifier: Apache-2.0
"""The tables in the documents are those of the committed JSON; result files keep what they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.common import ResultFile, median, quartile_spread, spread


def test_every_table_in_the_documents_is_the_committed_json() -> None:
    stale = [str(path.relative_to(tables.ROOT)) for path in tables.stale()]
    assert not stale, f"run `python -m benchmarks.tables`: {stale}"


def test_the_benchmarks_page_shows_every_table() -> None:
    shown = {mark["name"] for mark in tables.MARK.finditer((tables.ROOT / "docs" / "benchmarks.md").read_text())}
    assert shown == set(tables.TABLES)


def test_a_stale_table_is_seen_and_an_unknown_one_is_an_error() -> None:
    text = "before\n<!-- table: serve-ab -->\nold\n<!-- end of table -->\nafter\n"
    right = tables.rewrite(text)
    assert right != text and right.startswith("before\n") and right.endswith("after\n")
    assert tables.rewrite(right) == right
    with pytest.raises(KeyError, match="no-such"):
        tables.rewrite(text.replace("serve-ab", "no-such"))


def test_a_result_file_grows_row_by_row_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first = ResultFile(path, "x", ["arm", "value"])
    first.add({"arm": "a", "value": None, "ms": 1})
    first.add({"arm": "a", "value": 2, "ms": 2})
    first.add({"arm": "a", "value": 2, "ms": 3})
    assert [row["ms"] for row in json.loads(path.read_text())["rows"]] == [1, 3]
    again = ResultFile(path, "x", ["arm", "value"], resume=True)
    assert again.has(arm="a", value=None) and not again.has(arm="b", value=None)
    assert not ResultFile(path, "x", ["arm", "value"]).has(arm="a", value=2)
    assert set(json.loads(path.read_text())) == {"machine", "versions", "date", "command", "key", "rows"}


def test_spreads() -> None:
    assert median([3, 1, 2]) == 2 and spread([1.0, 2.0, 3.0]) == 1.0
    assert quartile_spread([1.0, 1.0, 1.0, 1.0, 100.0]) < spread([1.0, 1.0, 1.0, 1.0, 100.0])
