# SPDX-License-Identifier: Apache-2.0
"""The C++ core and the state machine over it, built and run under the sanitizers (`make sanitize`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_nothing_is_found(root: Path, sanitizer: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST_", "VATTN_"))}
    done = subprocess.run(
        ["make", f"sanitize-{sanitizer}"],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "100% tests passed" in done.stdout  # ctest's
    assert "1 passed" in done.stdout  # the state machine's
