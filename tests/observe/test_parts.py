# SPDX-License-Identifier: Apache-2.0
"""Small parts, without a server."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_vattn.observe.client import rate
from sglang_vattn.observe.observer import SharedPages
from sglang_vattn.observe.page import StateSource, _without_polls, install
from sglang_vattn.observe.tree_view import keyed_hash
from sglang_vattn.refusals import Refused
from sglang_vattn.request_pages import RequestPages


def test_several_http_processes_are_refused() -> None:
    with pytest.raises(Refused, match="--tokenizer-worker-num"):
        install(SimpleNamespace(tokenizer_worker_num=2))


def test_tenants_are_hashes_that_tell_them_apart() -> None:
    assert keyed_hash(("", "", "")) == keyed_hash(None) == ""
    names = {keyed_hash(("alice", "", "")), keyed_hash(("", "alice", "")), keyed_hash(("bob", "", ""))}
    assert len(names) == 3
    assert not any("alice" in name for name in names)


def test_shared_pages_follow_requests_that_come_and_go() -> None:
    shared = SharedPages()
    first, second = RequestPages([1, 2, 3], 3), RequestPages([1, 2, 9], 2)
    steps: list[tuple[dict[int, RequestPages], tuple[int, int]]] = [
        ({}, (0, 0)),
        ({0: first}, (3, 3)),
        ({0: first, 1: second}, (3, 5)),
        ({1: second}, (2, 2)),
        ({0: first, 1: second, 2: RequestPages([7, 8], 0)}, (3, 5)),
        ({}, (0, 0)),
    ]
    for requests, (pages, holders) in steps:
        allocator: Any = SimpleNamespace(requests=requests, pages=SimpleNamespace(num_pages=10))
        shared.update(allocator)
        assert shared.facts() == {"shared_pages": pages, "shared_page_holders": holders}


def test_many_viewers_cost_one_question() -> None:
    asked = []

    async def ask() -> list[dict[str, Any]]:
        asked.append(1)
        await asyncio.sleep(0.01)
        return [{"facts": {}}]

    async def look() -> list[Any]:
        source = StateSource(ask)
        return await asyncio.gather(*(source() for _ in range(20)))

    answers = asyncio.run(look())
    assert len(asked) == 1
    assert {answer.body for answer in answers} == {answers[0].body}
    assert answers[0].headers["cache-control"] == "no-store"


def test_polls_are_left_out_of_the_access_log() -> None:
    def record(path: str, status: int) -> logging.LogRecord:
        args = ("127.0.0.1:1", "GET", path, "1.1", status)
        return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)

    assert not _without_polls(record("/vattn/state", 200))
    assert _without_polls(record("/vattn/state", 401)), "who has no key is logged"
    assert _without_polls(record("/vattn", 200)) and _without_polls(record("/generate", 200))


def test_rate() -> None:
    history = {"time_s": [0.0, 10.0, 20.0, 30.0], "maps": [0.0, 10.0, 30.0, 90.0]}
    assert rate(history, "maps", over_s=10) == 6.0
    assert rate(history, "maps", over_s=100) == 3.0
    assert rate({}, "maps") == rate({"time_s": [1.0], "maps": [1.0]}, "maps") == 0.0
