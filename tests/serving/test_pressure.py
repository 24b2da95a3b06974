# SPDX-License-Identifier: Apache-2.0
"""Small pools: eviction, retraction, torn chunks, aborts. Outputs stay right throughout."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.checks import assert_same_outputs, unharmed, until
from tests.support.client import Answer
from tests.support.golden import Case, Golden
from tests.support.server import STRICT, Server
from tests.support.tiny_model import end_of_text

AT_ONCE = 16
POOL = 1536  # tokens
CHUNK = 48  # tokens
SMALL = ["--kv-backend=vattn", "--page-size=16", f"--chunked-prefill-size={CHUNK}"]


@pytest.fixture(scope="module")
def small(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Holds about 6 of the 16 requests that are under way."""
    flags = [*SMALL, f"--max-total-tokens={POOL}", "--schedule-conservativeness=0.1"]
    with Server(llama, tmp_path_factory.mktemp("small"), flags, env=STRICT) as server:
        yield server


@pytest.fixture
def server(small: Server) -> Iterator[Server]:
    with unharmed(small):
        yield small


def jobs(cases: list[Case]) -> list[tuple[tuple[int, ...], int]]:
    return [(case.prompt, case.new_tokens) for case in cases]


def test_eviction(server: Server, golden: Golden) -> None:
    """All prompts together are ten times the pool."""
    cases = golden["stress"]
    answers = server.many(jobs(cases), AT_ONCE)
    assert_same_outputs(cases, answers)
    assert sum(answer.cached_tokens for answer in answers) > 0


def test_retraction(server: Server, golden: Golden, llama: Path) -> None:
    """Outputs that might end early are admitted in hope; here none does, and the pool runs full."""
    cases = [case for case in golden["growing"] if end_of_text(llama) not in case.output]
    assert len(cases) > 10
    retractions = 0
    for _ in range(6):  # on a busy machine they may arrive too far apart to fill the pool
        server.flush()
        answers = server.many(jobs(cases), AT_ONCE, ignore_eos=False)
        assert_same_outputs(cases, answers)
        retractions = sum(answer.meta["num_retractions"] for answer in answers)
        if retractions > 0:
            break
    assert retractions > 0
    assert "KV cache pool is full. Retract requests" in server.log()


def test_retraction_of_everything_at_every_third_step(llama: Path, golden: Golden, tmp_path: Path) -> None:
    """SGLang's own test switch; what is retracted is computed again, from the cache."""
    flags = [*SMALL, "--max-total-tokens=2048"]
    with Server(llama, tmp_path, flags, env=STRICT | {"SGLANG_TEST_RETRACT": "1"}) as server, unharmed(server):
        cases = golden["stress"]
        answers = server.many(jobs(cases), AT_ONCE)
        assert_same_outputs(cases, answers)
        assert sum(answer.meta["num_retractions"] for answer in answers) >= 20


def test_chunks_tear_pages(server: Server, golden: Golden) -> None:
    """After a hit of 37 tokens the first chunk begins in mid-page.

    SGLang ends a chunk at the last page border that its budget reaches: 37 + 43 = 5 pages.
    """
    rng = random.Random(21)
    prefix = rng.choices(range(256), k=37)
    server.generate(prefix, 1)
    prompt = (*prefix, *rng.choices(range(256), k=200))
    right = golden.output(prompt, 40)
    answer = server.generate(prompt, 40)
    assert answer.cached_tokens == 37
    assert answer.output == right
    assert re.search(r"Prefill batch.*#new-token: 43, #cached-token: 37,", server.log())


def test_the_same_prefix_twice_at_the_same_time(server: Server, golden: Golden) -> None:
    """Two requests compute one prefix side by side; neither's pages go while it runs.

    Both arrive in one message, so both are admitted before either is in the cache. Then others take every page that is
    free for as long as they run: one that was freed under a live row would be overwritten.
    """
    rng = random.Random(22)
    prefix = rng.choices(range(256), k=21)  # both fit one chunk of 48 tokens
    both = [(*prefix, 1), (*prefix, 2)]
    right = [golden.output(prompt, 240) for prompt in both]
    others: list[Answer] = []
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.together, both, 240)
        until(lambda: server.under_way() == 2, "both decode")  # earlier, others could take the room of one in a chunk
        while not answers.done():
            others += server.many([(tuple(rng.choices(range(256), k=300)), 4) for _ in range(2)], at_once=2)
        assert [answer.output for answer in answers.result()] == right
    assert [answer.cached_tokens for answer in answers.result()] == [0, 0]
    assert {answer.finish for answer in others} == {"length"}
    assert len(others) * 304 > POOL, "they went through the whole pool"
    assert server.generate((*prefix, 3), 1).cached_tokens == len(prefix)


class Aborter:
    """Starts requests and aborts them, in a thread, until told to stop."""

    def __init__(self, server: Server, prompts: list[tuple[int, ...]]) -> None:
        self._server, self._prompts = server, prompts
        self._stop = threading.Event()
        self.ended: list[Answer] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        rng = random.Random(23)
        with ThreadPoolExecutor(1) as pool:
            for number in range(10_000):
                if self._stop.is_set():
                    return
                rid = f"aborted-{number:06d}"  # of one width: SGLang aborts by prefix
                prompt = rng.choice(self._prompts)
                answer = pool.submit(self._server.generate, prompt, 200, rid)
                self._stop.wait(rng.choice([0.0, 0.02, 0.1, 0.3]))
                while not answer.done():  # an abort that overtakes its request hits nothing
                    self._server.abort(rid)
                    self._stop.wait(0.02)
                self.ended.append(answer.result())

    def __enter__(self) -> Aborter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()


def test_aborts_among_others(server: Server, golden: Golden) -> None:
    """Aborted requests share prefixes with those that must stay right."""
    cases = golden["stress"]
    shared = [case.prompt for case in cases if len(case.prompt) > 300][:8]
    with Aborter(server, shared) as aborter:
        answers = server.many(jobs(cases), AT_ONCE)
    assert_same_outputs(cases, answers)
    aborted = [answer for answer in aborter.ended if answer.finish == "abort"]
    assert len(aborted) >= 5
    assert any(answer.output for answer in aborted), "none was aborted in its decode"


def aborted_in_prefill(server: Server, prompt: tuple[int, ...], rid: str) -> bool:
    """Whether the abort, sent when two chunks are done, came before the last; if so, it must have ended the request."""
    before = server.log().count("Prefill batch")

    def chunks() -> int:
        return server.log().count("Prefill batch") - before

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, prompt, 50, rid)
        while not answer.done() and chunks() < 3:
            pass
        server.abort(rid)
    if chunks() >= len(prompt) // CHUNK:
        return False
    assert answer.result().finish == "abort"
    assert answer.result().output == ()
    return True


def test_abort_in_prefill(server: Server, golden: Golden) -> None:
    """1200 tokens in chunks of 48: the abort comes after the first chunk, before the last.

    On a busy machine it may come later; then another prompt is tried.
    """
    rng = random.Random(24)
    for attempt in range(10):
        prompt = tuple(rng.choices(range(256), k=1200))
        if aborted_in_prefill(server, prompt, f"in-prefill-{attempt:03d}"):
            break
    else:
        pytest.fail("no abort came before the last chunk")
    # What was computed may stay in the cache; what comes after it is computed afresh.
    assert server.generate(prompt, 30).output == golden.output(prompt, 30)


def test_abort_in_decode(server: Server, golden: Golden) -> None:
    prompt = tuple(random.Random(25).choices(range(256), k=100))
    right = golden.output(prompt, 30)
    last = None
    for last in server.stream(prompt, 1000, rid="in-decode-000"):
        if len(last.output) == 20:
            server.abort("in-decode-000")
    assert last is not None
    assert last.finish == "abort"
    assert 20 <= len(last.output) < 1000
    again = server.generate(prompt, 30)
    assert again.output == right
    assert again.cached_tokens == len(prompt) - 1
