# SPDX-License-Identifier: Apache-2.0
"""The kernel that docs/kernels.md shows."""

from __future__ import annotations

import re
from pathlib import Path

MODULE, NAME = "plain_kernel", "plain_kernel:Plain"


def shown_kernel(root: Path) -> str:
    """The source of the document's only Python block."""
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", (root / "docs" / "kernels.md").read_text(), re.MULTILINE | re.DOTALL
    )
    source: str = block
    return source


def write_shown_kernel(root: Path, folder: Path) -> None:
    (folder / f"{MODULE}.py").write_text(shown_kernel(root))
