# SPDX-License-Identifier: Apache-2.0
"""A retrieval workload: several questions about each of a few documents, then a follow-up.

The prompt of a question is the document, then the question, so all questions about one document
share it as their prefix. The follow-up re-sends a question's prompt and its answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support.client import Answer, Client

FOLDER = Path(__file__).parent / "documents"
QUESTIONS = (
    "In which year did it begin, and who was in charge?",
    "What went wrong first, and what did it cost?",
    "Which numbers in the text are lengths or depths?",
    "Who measured or recorded something, and how?",
    "What was decided against, and later done after all?",
    "What is it like today?",
)
FOLLOW_UP = "\n\nSay that again in one sentence.\n\nAnswer: "
NEW_TOKENS = 24
AT_ONCE = 2


class Document(NamedTuple):
    name: str
    tokens: tuple[int, ...]


class Job(NamedTuple):
    document: int
    turn: str  # "question 3" or "follow-up"
    prompt: tuple[int, ...]
    prefix_tokens: int  # leading tokens that an earlier request computes too


class Result(NamedTuple):
    job: Job
    answer: Answer
    ttft_s: float  # from sending the request to its first token
    expected: int  # tokens that must hit: the prefix, if its prefill was done when this was sent


def documents(encode: Callable[[str], list[int]]) -> list[Document]:
    return [Document(path.stem, tuple(encode(path.read_text() + "\n"))) for path in sorted(FOLDER.glob("*.txt"))]


def questions(library: list[Document], encode: Callable[[str], list[int]]) -> list[Job]:
    """Question by question over all documents, as several readers would ask."""
    jobs = []
    for number, question in enumerate(QUESTIONS, 1):
        asked = tuple(encode(f"Question {number}: {question}\n\nAnswer: "))
        for i, document in enumerate(library):
            jobs.append(Job(i, f"question {number}", document.tokens + asked, len(document.tokens)))
    return jobs


def follow_ups(last_turns: list[Result], encode: Callable[[str], list[int]]) -> list[Job]:
    """One more turn on each conversation: its prompt, its answer, and a request.

    The last token of an answer is never fed to the model, so there is no KV of it to hit.
    """
    more = tuple(encode(FOLLOW_UP))
    jobs = []
    for result in last_turns:
        so_far = result.job.prompt + result.answer.output
        jobs.append(Job(result.job.document, "follow-up", so_far + more, len(so_far) - 1))
    return jobs


class Run:
    """The workload on one server, AT_ONCE requests at a time."""

    def __init__(
        self,
        client: Client,
        library: list[Document],
        encode: Callable[[str], list[int]],
        done: Callable[[], None],
    ) -> None:
        self._client, self._library, self._encode, self._done = client, library, encode, done
        self._prefilled: set[int] = set()
        self._lock = threading.Lock()
        self.seconds = 0.0

    def __call__(self) -> list[Result]:
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked = list(pool.map(self._ask, questions(self._library, self._encode)))
            last_turns = asked[-len(self._library) :]
            followed = list(pool.map(self._ask, follow_ups(last_turns, self._encode)))
        self.seconds = time.monotonic() - began
        return asked + followed

    def _ask(self, job: Job) -> Result:
        with self._lock:
            expected = job.prefix_tokens if job.document in self._prefilled else 0
        sent = time.monotonic()
        ttft = 0.0
        last = None
        for last in self._client.stream(job.prompt, NEW_TOKENS):  # noqa: B007 (used after the loop)
            if not ttft:  # the first token: the prefill is done
                ttft = time.monotonic() - sent
                with self._lock:
                    self._prefilled.add(job.document)
        assert last is not None
        self._done()
        return Result(job, last, ttft, expected)
