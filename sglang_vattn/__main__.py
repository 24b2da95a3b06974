# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_vattn``: look at a running server, or at this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 for success, 1 if the server or the machine is not as it should be, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m sglang_vattn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    top = commands.add_parser("top", help="the pool of a running server in the terminal, live")
    top.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    top.add_argument("--once", action="store_true", help="print once and end")
    snapshot = commands.add_parser("snapshot", help="the map of a running server as a picture")
    for command in (top, snapshot):
        command.add_argument("url", help="such as http://localhost:30000")
        command.add_argument("--api-key", default=os.environ.get("SGLANG_API_KEY"), help="or in SGLANG_API_KEY")
        command.add_argument("--rank", type=int, default=0, help="which data-parallel rank")
    snapshot.add_argument("out", type=Path, help="name of the file, ending in .svg or .png")
    snapshot.add_argument("--theme", choices=["light", "dark"], default="light")
    commands.add_parser("doctor", help="what this machine has, and whether vattn can run on it")
    args = parser.parse_args(argv)

    if args.command == "doctor":
        from sglang_vattn.observe import doctor

        return doctor.run()
    if args.command == "top":
        from sglang_vattn.observe import top as top_command

        return top_command.run(args.url, args.api_key, args.rank, args.interval, args.once)
    from sglang_vattn.observe import client, colors
    from sglang_vattn.observe import snapshot as pictures

    try:
        view = client.fetch(args.url, args.api_key, args.rank)
        pictures.write(view, args.out, colors.DARK if args.theme == "dark" else colors.LIGHT)
    except (client.Unreachable, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
