# SPDX-License-Identifier: Apache-2.0
"""The real servers that the serving tests talk to. Each starts when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import STRICT, Server

# Large enough that nothing is evicted in a sequential run, whatever the page size.
AMPLE_POOL = "--max-total-tokens=131072"


@pytest.fixture(scope="session")
def page16(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ours with 16 tokens a page, prefilling in small chunks."""
    flags = ["--kv-backend=vattn", "--page-size=16", "--chunked-prefill-size=64", AMPLE_POOL]
    with Server(llama, tmp_path_factory.mktemp("page16"), flags, env=STRICT) as server:
        yield server
