# SPDX-License-Identifier: Apache-2.0
"""What every test may use: the checkout's folders and the tiny models in build/."""

from __future__ import annotations

from pathlib import Path

import pytest

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
