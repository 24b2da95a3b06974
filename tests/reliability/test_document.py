# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md names tests that exist, every report and every kit."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

REPORTS = {*range(1, 72)} - {19, 27, 29, 38, 40, 41, 42, 43, 47, 51, 53, 65, 66}


@pytest.fixture
def document(root: Path) -> str:
    return (root / "docs" / "reliability.md").read_text()


def test_every_report_has_a_row(document: str) -> None:
    rows = document[document.index("## The reports") :]
    numbers = [int(n) for row in re.findall(r"^\| ([\d, ]+) \|", rows, re.MULTILINE) for n in row.split(",")]
    assert len(numbers) == len(set(numbers)) == 58
    assert set(numbers) == REPORTS


def test_every_named_test_exists(document: str, root: Path) -> None:
    files = list((root / "tests").rglob("test_*.py"))
    sources = "\n".join(path.read_text() for path in files)
    stems = {path.stem for path in [*files, *(root / "csrc" / "tests").iterdir()]}
    names = set(re.findall(r"\btest_\w+(?![\w.*])", document)) - stems
    assert len(names) > 20
    assert [name for name in sorted(names) if f"def {name}" not in sources] == []


def test_every_kit_is_run_or_has_a_reason(document: str) -> None:
    import sglang.test.kits as kits

    names = [each.name for each in pkgutil.iter_modules(kits.__path__)]
    assert len(names) > 20
    assert [name for name in names if f"`{name}`" not in document] == []
