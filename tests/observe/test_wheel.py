# SPDX-License-Identifier: Apache-2.0
"""The wheel carries every file of the packages, the page's script and style too. (Built without the core: quick.)"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = {"sglang_vattn": "sglang_vattn", "radix": "sglang_vattn/radix"}  # folder -> its place in the wheel
LEFT_OUT = {".so", ".pyc"}  # compiled


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-C", "wheel.cmake=false"]
    subprocess.run([*build, "-w", str(folder), str(root)], check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def test_every_file_is_in_it(wheel: Path, root: Path) -> None:
    wanted = {
        f"{place}/{path.relative_to(root / folder).as_posix()}"
        for folder, place in PACKAGES.items()
        for path in (root / folder).rglob("*")
        if path.is_file()
        and path.suffix not in LEFT_OUT
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }
    assert sum("/observe/assets/" in name for name in wanted) >= 7
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_the_page_is_the_same_from_the_wheel(wheel: Path, root: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from sglang_vattn.observe import page; print(page.page_html())"
    )

    def page(folder: Path) -> str:  # -S: no site-packages, so not the installed one
        command = [sys.executable, "-S", "-c", script, str(folder)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path).stdout

    assert page(tmp_path) == page(root)
    assert "<script>" in page(tmp_path) and "/*JS*/" not in page(tmp_path)
