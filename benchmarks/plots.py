# SPDX-License-Identifier: Apache-2.0
"""Plots of the prefix-hit benchmark's sweeps, from its JSON, as PNG and SVG.

    python -m benchmarks.plots benchmarks/results/h200/prefix_hit.json docs/plots/h200

`benchmarks.tables` shows what lies there below the table. A sweep of which one value was measured is no plot.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import Row

PANELS = (
    ("ttft_ms", "TTFT, ms"),
    ("decode_step_ms", "decode step, ms"),
    ("tokens_per_s", "output tokens a second"),
    ("most_tokens_used", "most tokens held by requests"),
    ("map_calls", "map calls"),
)
LABELS = {
    "prefix": "tokens of the prefix",
    "members": "requests a prefix",
    "prefixes": "prefixes",
    "own": "own tokens a request",
    "output": "output tokens a request",
    "arrival": "arrival (a number: requests a second)",
    "zipf": "Zipf exponent of the prefixes' popularity",
}
STYLES = {
    "vattn": ("#0a6", "o", "-"),
    "stock_page1": ("#c33", "s", "--"),
    "stock_page128": ("#36c", "^", "--"),
    "stock_no_hits": ("#888", "x", ":"),
}


def draw(rows: list[Row], sweep: str, title: str, out: Path) -> list[Path]:
    """One figure for a sweep, a panel a measure; error bars go from the least to the greatest round."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sglang-vattn"  # the same file from the same numbers
    from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]

    values = list(dict.fromkeys(row["value"] for row in rows))
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.4), layout="constrained")
    for axis, (measure, label) in zip(axes, PANELS, strict=True):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            if measure == "map_calls" and arm != "vattn":
                continue
            points = [row for row in rows if row["arm"] == arm]
            at = [values.index(row["value"]) for row in points]
            middle = [row[measure] for row in points]
            each = [[one[measure] for one in row["raw"]] for row in points]
            bars = [[m - min(e) for m, e in zip(middle, each, strict=True)],
                    [max(e) - m for m, e in zip(middle, each, strict=True)]]  # fmt: skip
            color, marker, line = STYLES.get(arm, ("#a0a", "d", "-"))
            axis.errorbar(at, middle, yerr=bars, label=arm, color=color, marker=marker, linestyle=line, capsize=3)
        axis.set_xticks(range(len(values)), ["uniform" if value is None else str(value) for value in values])
        axis.set_xlabel(LABELS.get(sweep, sweep))
        axis.set_title(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"prefix_hit_{sweep}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=110, metadata=metadata)
    pyplot.close(figure)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    result = json.loads(args.results.read_text())
    where = result["machine"].get("gpu") or result["machine"].get("cpu", "")
    for sweep in dict.fromkeys(row["sweep"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["sweep"] == sweep]
        if len({str(row["value"]) for row in rows}) < 2:
            continue
        for path in draw(rows, sweep, f"{sweep}, {where}, {result['date']}", args.out):
            print(path)


if __name__ == "__main__":
    main()
