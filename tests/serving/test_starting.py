# SPDX-License-Identifier: Apache-2.0
"""The process that the tests fork servers from: two threads that start servers get one each, from the same process."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support import server
from tests.support.zygote import Zygote


class Answers:
    """Both pipes of a process that says to each request its own number, a little later, to the last one first."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def flush(self) -> None: ...

    def write(self, line: str) -> None:
        self.asked.append(json.loads(line)["poll"])
        time.sleep(0.001)

    def readline(self) -> str:
        time.sleep(0.001)
        return json.dumps(self.asked.pop())


def test_each_thread_gets_its_own_answer() -> None:
    zygote, pipe = Zygote.__new__(Zygote), Answers()
    zygote._process = cast(Any, SimpleNamespace(stdin=pipe, stdout=pipe))
    zygote._one_at_a_time = threading.Lock()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pid: zygote.ask(poll=pid), range(64))) == list(range(64))


def test_one_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    @cache
    def slowly() -> object:
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(server, "_zygote", slowly)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: id(server.zygote()), range(4)))) == 1
