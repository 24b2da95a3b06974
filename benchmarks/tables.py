# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md and docs/, from the committed JSON.

    python -m benchmarks.tables            # rewrite them
    python -m benchmarks.tables --check    # end with 1 if one differs (a test does the same)

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import table_rows
from benchmarks.common import RESULTS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/benchmarks.md", "docs/operations.md", "docs/architecture.md", "docs/compatibility.md")
PLOTS = ROOT / "docs" / "plots"
MARK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Result = dict[str, Any]
# name -> (result file below benchmarks/results, its table, the command that makes the file)
TABLES: dict[str, tuple[str, Callable[[Result], Sequence[Sequence[str]]], str]] = {
    "serve-ab": ("h200/serve_ab.json", table_rows.serve_ab, "python -m benchmarks.serve_ab"),
    "serve-ab-x2": ("h200x2/serve_ab.json", table_rows.serve_ab, "python -m benchmarks.serve_ab --tp-size 2"),
    "first-token": ("h200/first_token.json", table_rows.first_token, "python -m benchmarks.first_token"),
    "steady": ("h200/steady.json", table_rows.steady, "python -m benchmarks.steady"),
    "scrub": ("h200/scrub_cost.json", table_rows.scrub_cost, "python -m benchmarks.scrub_cost"),
    "observe-cpu": ("cpu/observe_cost.json", table_rows.observe_cost, "python -m benchmarks.observe_cost"),
    "observe-gpu": (
        "h200/observe_cost.json", table_rows.observe_cost, "python -m benchmarks.observe_cost --device cuda",
    ),
    "trace-replay": ("cpu/trace_replay.json", table_rows.trace_replay, "python -m benchmarks.trace_replay --simulate"),
    "trace-cost": ("cpu/trace_replay.json", table_rows.trace_cost, "python -m benchmarks.trace_replay --simulate"),
    "trace-live": (
        "h200/trace_live.json", table_rows.trace_live,
        "python -m benchmarks.trace_replay --serve vattn --device cuda --seconds 120",
    ),
    "tree": ("cpu/tree.json", table_rows.tree, "python -m benchmarks.tree"),
    "kernels-cpu": ("cpu/kernels.json", table_rows.kernels_host, "python -m benchmarks.kernels"),
    "kernels-gpu": ("h200/kernels.json", table_rows.kernels_cuda, "python -m benchmarks.kernels --device cuda"),
    "kernels-shared": ("h200/kernels.json", table_rows.kernels_shared, "python -m benchmarks.kernels --device cuda"),
    "layout": ("h200/probe_layout.json", table_rows.layouts, "python -m benchmarks.probes.layout"),
    "two-level": ("h200/probe_two_level.json", table_rows.two_level_orders, "python -m benchmarks.probes.two_level"),
    "vmm-cpu": ("cpu/vmm.json", table_rows.vmm, "python -m benchmarks.vmm"),
    "vmm-gpu": ("h200/vmm.json", table_rows.vmm, "python -m benchmarks.vmm --device cuda"),
    "prefix-hit-cpu": ("cpu/prefix_hit.json", table_rows.prefix_hit, "python -m benchmarks.prefix_hit"),
    "prefix-hit-gpu": ("h200/prefix_hit.json", table_rows.prefix_hit, "python -m benchmarks.prefix_hit --device cuda"),
}  # fmt: skip


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def render(name: str) -> str:
    """A table as it should stand in the text, with where it comes from."""
    file, build, command = TABLES[name]
    path = RESULTS / file
    if not path.exists():
        return f"Not measured yet: `{command}`.\n"
    result = json.loads(path.read_text())
    parts = [(name, str(value).split("\n")[0]) for name, value in result["machine"].items()]
    where = ", ".join(value if name in ("cpu", "gpu") else f"{name} {value}" for name, value in parts)
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    text = markdown(build(result))
    text += f"\n`{result['command']}`, {result['date']}, {where}; {versions}. Raw: `benchmarks/results/{file}`.\n"
    for note in result.get("notes", []):
        text += f"\n> {note}\n"
    for plot in sorted((PLOTS / path.parent.name).glob(f"{path.stem}_*.svg")):  # see plots.py
        text += f"\n![{plot.stem}](plots/{path.parent.name}/{plot.name})\n"
    return text


def rewrite(text: str) -> str:
    """The text with every table as it should be. KeyError names a table that does not exist."""
    return MARK.sub(lambda mark: mark[1] + render(mark["name"]) + mark[3], text)


def stale() -> dict[Path, str]:
    """Pages with a table that differs from the committed JSON, and what they should be."""
    out = {}
    for page in PAGES:
        path = ROOT / page
        if path.exists() and (right := rewrite(text := path.read_text())) != text:
            out[path] = right
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, end with 1 if a table is stale")
    args = parser.parse_args()
    pages = stale()
    for path, text in pages.items():
        print(path.relative_to(ROOT))
        if not args.check:
            path.write_text(text)
    sys.exit(bool(pages) and args.check)


if __name__ == "__main__":
    main()
