# SPDX-License-Identifier: Apache-2.0
"""Two servers: one with a large pool, open; one with 64 pages, behind a key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import STRICT, Server

KEY = "a-key-of-the-test"
CHECKED = {**STRICT, "VATTN_TEST_INTEGRITY": "1"}
FLAGS = ("--kv-backend=vattn", "--page-size=16", "--vattn-page", "--enable-metrics")


@pytest.fixture(scope="session")
def large(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """7,000 pages."""
    flags = [*FLAGS, "--max-total-tokens=112000", "--max-running-requests=48", "--chunked-prefill-size=256"]
    with Server(llama, tmp_path_factory.mktemp("large"), flags, env=CHECKED) as server:
        yield server


class GuardedServer(Server):
    """Sends its key with every request."""

    def open(self, path: str, body: object = None, limit_s: float = 180.0, key: str | None = KEY) -> object:
        import json
        import urllib.request

        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, headers=headers)
        return urllib.request.urlopen(request, timeout=limit_s)


@pytest.fixture(scope="session")
def guarded(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    """64 pages, and an API key."""
    flags = [*FLAGS, "--max-total-tokens=1024", "--max-running-requests=6", f"--api-key={KEY}"]
    with GuardedServer(llama, tmp_path_factory.mktemp("guarded"), flags, env=CHECKED) as server:
        yield server
