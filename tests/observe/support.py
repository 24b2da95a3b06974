# SPDX-License-Identifier: Apache-2.0
"""The four views of one server, brought to one form, and a load that keeps requests running."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_vattn.observe.metrics import METRICS
from tests.support.server import Server

SERIES = re.compile(r"^(sglang:vattn_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
# Read at another moment than the rest, or counting the reading itself.
MOVING = {"observe_ns", "state_ns"}


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """The exported series, by name and the value of the metric's own label."""
    out: dict[tuple[str, str], float] = {}
    labels = {metric.exported: metric.label for metric in METRICS}
    for name, pairs, value in SERIES.findall(server.text("/metrics")):
        if name.endswith("_created"):
            continue
        own = re.search(rf'(?:^|,){labels[name]}="([^"]*)"', pairs) if labels[name] else None
        out[name, own[1] if own else ""] = float(value)
    return out


def expected_metrics(facts: dict[str, int]) -> dict[tuple[str, str], float]:
    """What the metrics must be for these facts."""
    return {
        (metric.exported, label): facts[fact] * metric.scale
        for metric in METRICS
        for label, fact in metric.facts.items()
        if fact not in MOVING
    }


def state(server: Server) -> dict[str, Any]:
    """One rank's whole state, asked anew (the server answers twice within half a second alike)."""
    time.sleep(0.6)
    answer: dict[str, Any] = json.loads(server.text("/vattn/state"))["ranks"][0]
    return answer


def numbers(text: str, size: int) -> list[int]:
    raw = base64.b64decode(text)
    return [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]


def row_pages(whole: dict[str, Any]) -> list[list[int]]:
    """Of every row: shared pages, own pages, pages reserved ahead."""
    return [numbers(whole["prefixes"][row["prefix"]], 4) + numbers(row["pages"], 4) for row in whole["rows"]]


def without_moving(facts: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in facts.items() if name not in MOVING}


def picture(root: Path, name: str) -> Path:
    """Where a screenshot goes: to build/; `VATTN_KEEP_SCREENSHOTS=1` renews those in docs/."""
    folder = root / ("docs/img" if os.environ.get("VATTN_KEEP_SCREENSHOTS") == "1" else "build/screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


class Load:
    """Clients that ask on and on: three documents, cut at several places, each with an end of its own."""

    def __init__(self, server: Server, clients: int, new_tokens: int) -> None:
        self.server, self.clients, self.new_tokens = server, clients, new_tokens
        self.done = 0
        self._over = threading.Event()
        words = random.Random(5)
        self._documents = [[words.randrange(256) for _ in range(length)] for length in (900, 500, 700)]

    def _client(self, number: int) -> None:
        choose = random.Random(number)
        while not self._over.is_set():
            document = choose.choice(self._documents)
            cut = len(document) // choose.choice((1, 2, 3))
            own = [choose.randrange(256) for _ in range(choose.randrange(5, 120))]
            self.server.generate(document[:cut] + own, self.new_tokens)
            self.done += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        threads: Sequence[threading.Thread] = [
            threading.Thread(target=self._client, args=(number,)) for number in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(120)


@contextmanager
def held(server: Server) -> Iterator[None]:
    """Generation stands still with all requests in place: every number is at rest."""
    server.text("/pause_generation", {"mode": "in_place"})
    time.sleep(0.5)
    try:
        yield
    finally:
        server.text("/continue_generation", {})
