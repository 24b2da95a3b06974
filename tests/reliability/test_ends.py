# SPDX-License-Identifier: Apache-2.0
"""Ends and pauses: each is right, or refused with a reason."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.reliability.conftest import SMALL_POOL
from tests.reliability.load import OUTPUT, Known, Load
from tests.support.checks import unharmed, until
from tests.support.server import STRICT, Server, ServerError

END_LIMIT_S = 90


@contextmanager
def under_way(server: Server, known: list[Known]) -> Iterator[None]:
    """Requests whose answers may be lost: the server ends meanwhile."""

    def send() -> None:
        with suppress(Exception):
            asyncio.run(Load(server, known, 16, seed=3).run(400))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    time.sleep(2)
    yield
    thread.join(END_LIMIT_S)
    assert not thread.is_alive(), "clients of a server that ended are still waiting"


def assert_right(server: Server, known: list[Known]) -> None:
    for each in known[:6]:
        assert server.generate(each.prompt, OUTPUT).output == each.output


def ended(server: Server) -> bool:
    try:
        server.assert_running()
    except ServerError:
        return True
    return False


def test_flush_is_refused_under_load_and_frees_all_after_it(small: Server, known: list[Known]) -> None:
    with unharmed(small), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(small.generate, known[0].prompt, 400)
        while small.vattn()["requests"] == 0:
            assert not answer.done()
        with pytest.raises(urllib.error.HTTPError, match="400"):
            small.text("/flush_cache", {})
        assert answer.result().output[:OUTPUT] == known[0].output
        assert_right(small, known)


def test_memory_occupation_released_and_resumed(small: Server, known: list[Known]) -> None:
    """Without SGLang's memory saver (which is refused) nothing is released: the cache is flushed, all goes on."""
    with unharmed(small):
        assert_right(small, known)
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            small.text(path, {})
        assert small.generate(known[0].prompt, 1).cached_tokens == 0
        assert_right(small, known)


def test_weights_update_drops_the_cache(small: Server, known: list[Known], llama: Path) -> None:
    with unharmed(small):
        small.generate(known[0].prompt, 4)
        answer = json.loads(small.text("/update_weights_from_disk", {"model_path": str(llama)}))
        assert answer["success"], answer
        assert small.generate(known[0].prompt, 1).cached_tokens == 0
        assert_right(small, known)


def test_pause_in_each_mode(small: Server, known: list[Known]) -> None:
    """in_place keeps pages and rows; retract gives them back, and computes again."""
    for mode in ("in_place", "retract"):
        with unharmed(small), ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(small.generate, each.prompt, OUTPUT) for each in known[:8]]
            time.sleep(0.3)
            small.text("/pause_generation", {"mode": mode})
            time.sleep(1)
            small.text("/continue_generation", {})
            for each, answer in zip(known, answers, strict=False):
                assert answer.result().output == each.output


def test_killed_and_terminated_under_load(llama: Path, known: list[Known], tmp_path: Path) -> None:
    """kill -9 of the process that holds the cache; start again; SIGTERM. No process is left over."""
    server = Server(llama, tmp_path, SMALL_POOL, env=STRICT)
    for signal_number in (signal.SIGKILL, signal.SIGTERM):
        with server:
            assert_right(server, random.Random(signal_number).sample(known, 6))
            scheduler = psutil.Process(server.scheduler_pid())
            family = [scheduler, *scheduler.children(recursive=True), *scheduler.parents()[:1]]
            with under_way(server, known):
                if signal_number == signal.SIGKILL:
                    os.kill(scheduler.pid, signal.SIGKILL)
                else:  # to the server's first process, as a service manager does
                    os.kill(scheduler.parents()[0].pid, signal.SIGTERM)
                until(lambda: ended(server), f"the end after signal {signal_number}", END_LIMIT_S, every_s=0.2)
            assert psutil.wait_procs(family, timeout=20)[1] == []
