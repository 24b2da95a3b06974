# SPDX-License-Identifier: Apache-2.0
"""Mixed load over many connections, each answer compared with what a stock server gives.

Plain requests, samples, streams, aborts, disconnects, client timeouts, requests that no pool of this size can hold.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from tests.support.client import Client
from tests.support.server import Server

OUTPUT = 48  # tokens known of each answer
ANSWER_LIMIT_S = 300.0  # the watchdog: no request may take longer


class Known(NamedTuple):
    """A prompt and how stock SGLang goes on, greedily."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def known_answers(stock: Client, count: int = 90) -> list[Known]:
    """Random cuts of four documents, with tails of their own, and prompts that share nothing."""
    rng = random.Random(7)
    documents = [[rng.randrange(256) for _ in range(400)] for _ in range(4)]
    prompts = []
    for i in range(count):
        shared = rng.randrange(1, 400) if i % 6 else 0
        prompts.append((*rng.choice(documents)[:shared], *(rng.randrange(256) for _ in range(rng.randrange(1, 60)))))
    answers = stock.many([(prompt, OUTPUT) for prompt in prompts], at_once=16)
    return [Known(prompt, answer.output) for prompt, answer in zip(prompts, answers, strict=True)]


class Load:
    """`await run(n)` sends n requests over `connections` connections and counts what came back."""

    def __init__(self, server: Server, known: Sequence[Known], connections: int, seed: int) -> None:
        self.server, self.known = server, known
        self.connections = connections
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest = 4000  # tokens: longer than any pool here, shorter than the context

    async def run(self, requests: int) -> None:
        kinds = self.random.choices(
            ["plain", "samples", "stream", "abort", "disconnect", "timeout", "too_long"],
            [70, 6, 8, 6, 5, 3, 2],
            k=requests,
        )
        queue = list(enumerate(kinds))
        limit = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
        # A connection a request: the server closes one that is idle, perhaps as the next request is written into it.
        connector = aiohttp.TCPConnector(limit=self.connections + 50, force_close=True)
        async with aiohttp.ClientSession(self.server.base, connector=connector, timeout=limit) as session:

            async def worker() -> None:
                while queue:
                    number, kind = queue.pop()
                    await self._one(session, kind, f"load-{number:08d}")

            await asyncio.gather(*(worker() for _ in range(self.connections)))

    async def _one(self, session: aiohttp.ClientSession, kind: str, rid: str) -> None:
        known = self.random.choice(self.known)
        tokens = self.random.randint(1, OUTPUT)
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": known.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        if kind == "samples":
            body["sampling_params"]["n"] = 2
            del body["rid"]
        if kind == "too_long":
            body["input_ids"] = (known.prompt * self.longest)[: self.longest]
        if kind in ("stream", "disconnect"):
            return await self._stream(session, kind, body, known, tokens)
        aborting = asyncio.create_task(self._abort(session, rid)) if kind == "abort" else None
        try:
            limit = aiohttp.ClientTimeout(total=0.05 if kind == "timeout" else ANSWER_LIMIT_S)
            async with session.post("/generate", json=body, timeout=limit) as response:
                answer = await response.json()
        except TimeoutError:
            self.outcomes[f"{kind}: timeout"] += 1
            if kind != "timeout":
                self.wrong.append(f"{rid}: no answer within {ANSWER_LIMIT_S} s")
            return None
        finally:
            if aborting is not None:
                await aborting
        for one in answer if isinstance(answer, list) else [answer]:
            self._judge(kind, rid, one, known, tokens)
        return None

    async def _stream(
        self, session: aiohttp.ClientSession, kind: str, body: dict[str, Any], known: Known, tokens: int
    ) -> None:
        last: dict[str, Any] = {}
        leave_after = self.random.randrange(1, 6)
        async with session.post("/generate", json={**body, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    last = json.loads(line[5:])
                    leave_after -= 1
                    if kind == "disconnect" and leave_after == 0:
                        self.outcomes["disconnect: left"] += 1
                        response.close()
                        return
        self._judge(kind, str(body["rid"]), last, known, tokens)

    async def _abort(self, session: aiohttp.ClientSession, rid: str) -> None:
        await asyncio.sleep(self.random.choice([0.0, 0.02, 0.2, 1.0]))
        async with session.post("/abort_request", json={"rid": rid}) as response:
            await response.read()

    def _judge(self, kind: str, rid: str, answer: dict[str, Any], known: Known, tokens: int) -> None:
        if "error" in answer or answer.get("object") == "error":
            outcome = "refused"
        else:
            outcome = answer["meta_info"]["finish_reason"]["type"]
            right = tuple(answer["output_ids"]) == known.output[: len(answer["output_ids"])]
            if not right and kind != "too_long":
                self.wrong.append(f"{kind} {rid}: {answer['output_ids'][:8]} instead of {known.output[:8]}")
            if outcome == "length" and len(answer["output_ids"]) != tokens:
                self.wrong.append(f"{kind} {rid}: {len(answer['output_ids'])} of {tokens} tokens")
        self.outcomes[f"{kind}: {outcome}"] += 1
        expected = {"too_long": {"refused", "abort"}, "abort": {"length", "abort", "refused"}}.get(kind, {"length"})
        if outcome not in expected:
            self.wrong.append(f"{kind} {rid}: {outcome} {str(answer)[:200]}")
