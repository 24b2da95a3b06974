# SPDX-License-Identifier: Apache-2.0
"""What every test may use: the checkout's folders, the tiny models in build/, and stock SGLang's answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.support.golden import Golden, stock_server
from tests.support.server import Server
from tests.support.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def llama() -> Path:
    """The folder of the tiny Llama."""
    return tiny_model(ROOT / "build" / "models", "llama")


@pytest.fixture(scope="session")
def qwen2() -> Path:
    """The folder of the tiny Qwen2 (biases on Q, K and V)."""
    return tiny_model(ROOT / "build" / "models", "qwen2")


@pytest.fixture(scope="session")
def golden(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """The right answers: those of a stock server, started when first needed."""
    with ExitStack() as servers:

        @cache
        def stock() -> Server:
            return servers.enter_context(stock_server(llama, tmp_path_factory.mktemp("stock")))

        base = tmp_path_factory.getbasetemp()  # of this process; with xdist its parent is the session's
        yield Golden(stock, (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "golden")
