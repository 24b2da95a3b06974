# SPDX-License-Identifier: Apache-2.0
"""Servers and right answers for the reliability tests; as few starts as possible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.load import Known, known_answers
from tests.support.golden import Golden
from tests.support.server import STRICT, Server

SOAK = os.environ.get("VATTN_SOAK") == "1"  # `make soak`: the long forms
SMALL_POOL = ["--kv-backend=vattn", "--page-size=16", "--chunked-prefill-size=64", "--max-total-tokens=2048"]


@pytest.fixture(scope="session")
def known(golden: Golden) -> list[Known]:
    """Prompts and the outputs of a stock server."""
    answers = golden.once("known", lambda: known_answers(golden.stock()))
    return [Known(tuple(prompt), tuple(output)) for prompt, output in answers]


@pytest.fixture(scope="session")
def small(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """128 pages of 16 tokens: about a tenth of what the load's prompts are together."""
    flags = [*SMALL_POOL, "--max-running-requests=48", "--schedule-conservativeness=0.3", "--enable-metrics"]
    with Server(llama, tmp_path_factory.mktemp("small"), flags, env=STRICT) as server:
        yield server
