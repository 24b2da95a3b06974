# SPDX-License-Identifier: Apache-2.0
"""Sharing is real: one physical page at many addresses, seen from outside the process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest

from tests.support.checks import pages_in_use, unharmed, until
from tests.support.client import Answer
from tests.support.maps import mapped_pages, parse_maps
from tests.support.server import Server

PAGE = 16
FULL_PAGES, TORN = 40, 3  # the shared prefix: 40 full pages, and 3 tokens of one more
_groups = count()


@pytest.fixture
def server(page16: Server) -> Iterator[Server]:
    with unharmed(page16):
        yield page16


class Decoding:
    """Long answers under way. `tokens[i]` is how many of answer i have arrived."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self._server, self._pool = server, pool
        self.group = f"decoding-{next(_groups):04d}-"
        self.tokens: list[int] = []
        self._answers: list[Callable[[], Answer]] = []

    def start(self, prompt: list[int]) -> None:
        """Returns when the answer's first token has arrived."""
        i = len(self.tokens)
        self.tokens.append(0)
        self._answers.append(self._pool.submit(self._follow, i, prompt).result)
        until(lambda: self.tokens[i] > 0, "a first token")

    def _follow(self, i: int, prompt: list[int]) -> Answer:
        last = None
        for last in self._server.stream(prompt, 3000, rid=f"{self.group}{i:02d}"):
            self.tokens[i] = len(last.output)
        assert last is not None
        return last

    def abort(self) -> None:
        for i in range(len(self._answers)):
            self._server.abort(f"{self.group}{i:02d}")
        for answer in self._answers:
            assert answer().finish == "abort", "one ended before the test had looked"


@contextmanager
def decoding(server: Server) -> Iterator[Decoding]:
    with ThreadPoolExecutor(16) as pool:
        under_way = Decoding(server, pool)
        try:
            yield under_way
        finally:
            under_way.abort()


def own_pages(prompt: list[int], output_tokens: int) -> int:
    """Pages that a request holds besides the shared ones."""
    return -(-(len(prompt) + output_tokens) // PAGE) - FULL_PAGES


def test_merged_lines_are_cut_into_pages() -> None:
    """The reader of /proc/<pid>/maps itself."""
    line = "{:x}-{:x} rw-s {:08x} 00:01 5      /memfd:{} (deleted)\n"
    two_pages = line.format(0x70000, 0x74000, 0x2000, "vattn-pages")
    again = line.format(0x78000, 0x7A000, 0x4000, "vattn-pages")
    other = line.format(0x90000, 0x92000, 0x4000, "other")
    assert parse_maps(two_pages + other + again, 0x2000) == {1: [0x70000], 2: [0x72000, 0x78000]}
    with pytest.raises(ValueError, match="torn"):
        parse_maps(line.format(0x70000, 0x71000, 0x2000, "vattn-pages"), 0x2000)


@pytest.mark.parametrize("k", [2, 8])
def test_a_shared_page_is_mapped_k_times_and_held_once(server: Server, k: int) -> None:
    """Each full page of the prefix of k live requests is mapped k times, and at home."""
    rng = random.Random(k)
    prefix = rng.choices(range(256), k=FULL_PAGES * PAGE + TORN)
    prompts = [[*prefix, i, *rng.choices(range(256), k=8)] for i in range(k)]
    page_bytes, pid = server.vattn()["page_bytes"], server.scheduler_pid()
    before = mapped_pages(pid, page_bytes)

    with decoding(server) as under_way:
        for prompt in prompts:  # the first computes the prefix, the others find it
            under_way.start(prompt)
        arrived = list(under_way.tokens)
        mapped, in_use, counters = (
            mapped_pages(pid, page_bytes),
            pages_in_use(server),
            server.vattn(),
        )
        arrived_later = list(under_way.tokens)

    assert set(mapped) == set(before), "every page is mapped at home, all the time"
    aliases = {page: len(at) - len(before[page]) for page, at in mapped.items()}
    shared = {page: n for page, n in aliases.items() if n > 1}
    assert shared == dict.fromkeys(shared, k)
    assert len(shared) == FULL_PAGES
    assert counters["requests"] == k

    # What grows with k is what each request computed itself; a page of slack for tokens that
    # were computed and had not arrived.
    pairs = list(zip(prompts, arrived, arrived_later, strict=True))
    assert in_use >= FULL_PAGES + sum(own_pages(prompt, low) for prompt, low, _ in pairs)
    assert in_use <= FULL_PAGES + sum(own_pages(prompt, high) + 1 for prompt, _, high in pairs)


def test_a_hit_aliases_full_pages_and_copies_the_rest(server: Server) -> None:
    """The counters of one hit, to the page and to the token."""
    rng = random.Random(11)
    prefix = rng.choices(range(256), k=FULL_PAGES * PAGE + TORN)
    server.generate(prefix, 1)
    before = server.vattn()
    answer = server.generate([*prefix, *rng.choices(range(256), k=5)], 2)
    after = server.vattn()
    assert answer.cached_tokens == len(prefix)
    moved = {name: after[name] - before[name] for name in ("hit_tokens", "pages_aliased")}
    assert moved == {"hit_tokens": len(prefix), "pages_aliased": FULL_PAGES}
    assert after["tokens_copied"] - before["tokens_copied"] == TORN
