# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md against the code. `python -m tests.observe.test_docs` prints the table to paste."""

from __future__ import annotations

from pathlib import Path

from sglang_vattn.observe.metrics import METRICS, Metric


def table() -> str:
    """The metrics as Markdown."""
    return "\n".join(["| metric | type | label | meaning |", "| --- | --- | --- | --- |", *map(_line, METRICS)])


def _line(metric: Metric) -> str:
    label = f"`{metric.label}`: {', '.join(metric.facts)}" if metric.label else ""
    return f"| `{metric.exported}` | {metric.kind} | {label} | {metric.help} |"


def test_the_table_of_metrics_is_the_code(root: Path) -> None:
    assert table() in (root / "docs" / "operations.md").read_text(), "paste: python -m tests.observe.test_docs"


def test_every_flag_is_described(root: Path) -> None:
    from sglang_vattn.args import _FIELDS

    text = (root / "docs" / "operations.md").read_text()
    assert [name for name in _FIELDS if f"`--{name.replace('_', '-')}" not in text] == []


def test_page_is_self_contained() -> None:
    from sglang_vattn.observe.page import page_html

    html = page_html()
    assert "/*JS*/" not in html and "/*CSS*/" not in html
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in html.replace('href="data:,"', "")


if __name__ == "__main__":
    print(table())
