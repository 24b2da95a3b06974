# SPDX-License-Identifier: Apache-2.0
"""The attention call alone: by pages against by rows, for every attention kernel installed.

    python -m benchmarks.kernels                     # host: torch_native's gather against rows
    python -m benchmarks.kernels --device cuda       # GPU: FA3, and all of docs/kernels.md that are installed

All arms of a case run in one process and take turns. Prefill has no prefix, extend adds new tokens to one, decode adds
one token. Figures are medians in ms a call; the spread is (max - min) / median on the GPU, and the distance of the
quartiles on the host, whose cores are shared.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ResultFile, Row


def format_row(row: Row) -> str:
    times = "  ".join(f"{arm} {ms:.4f}" for arm, ms in row["ms"].items())
    return f"{row['kernel']:<14} {row['case']:<32} {times}" + (f"  x{row['speedup']:.2f}" if "speedup" in row else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--small", action="store_true", help="few cases, few rounds")
    parser.add_argument("--rounds", type=int, help="measurements of an arm (host 15, GPU 20)")
    parser.add_argument(
        "--kernels", nargs="+", help="GPU: fa3, fa2, fa4, flashinfer, sdpa, torch (default: those installed)"
    )
    args = parser.parse_args()
    out = args.out or RESULTS / {"cpu": "cpu", "cuda": "h200"}[args.device] / "kernels.json"
    results = ResultFile(out, "kernels", ["kernel", "case"], device=args.device, resume=args.resume)
    part: Any = import_module(f"benchmarks.kernels_{'host' if args.device == 'cpu' else 'cuda'}")
    for row in part.measure(args, results.has):
        results.add(row)
        print(format_row(row), flush=True)


if __name__ == "__main__":
    main()
