# SPDX-License-Identifier: Apache-2.0
"""The mixed load of the soak, through `sglang.Engine`, and the judge of what comes back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.gpu.arm import distribution

ANSWER_LIMIT_S = 120.0  # the watchdog: no request may take longer
IN_FULL = 8  # one answer in so many is judged by whole distributions, too
KINDS = {"plain": 66, "samples": 8, "stream": 8, "abort": 14, "too_long": 4}  # weights


class Known(NamedTuple):
    """A prompt, and how stock SGLang went on: tokens (n,), log-probabilities (n, vocabulary)."""

    prompt: list[int]
    output: np.ndarray
    logprobs: np.ndarray


def make_prompts(count: int, longest: int, highest: int, seed: int = 5) -> list[list[int]]:
    """Cuts of six documents with ends of their own, whole documents among them; every eighth shares nothing."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(2, highest) for _ in range(n)]

    documents = [tokens(longest) for _ in range(6)]
    documents[1] = documents[0][: longest // 2] + documents[1][longest // 2 :]  # they part in the middle
    prompts = []
    for i in range(count):
        shared = rng.choice(documents)[: rng.randrange(1, longest)] if i % 8 else []
        prompts.append(shared + tokens(rng.randrange(1, longest // 8)))
    return prompts


def save_known(path: Path, known: list[Known]) -> None:
    arrays = {f"{name}_{i}": getattr(each, name) for i, each in enumerate(known) for name in ("output", "logprobs")}
    np.savez(path, prompts=json.dumps([each.prompt for each in known]), **arrays)


def load_known(path: Path) -> list[Known]:
    data = np.load(path)
    prompts = json.loads(str(data["prompts"]))
    return [Known(prompt, data[f"output_{i}"], data[f"logprobs_{i}"]) for i, prompt in enumerate(prompts)]


class Judge:
    """Compares answers with stock's, up to the first token that differs.

    `gaps`: by how much (nats) stock preferred its own token where an answer first went another way: a near tie, or
    wrong. `kl`: KL(stock || answer) of each output token's distribution.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.answers = self.tokens = 0
        self.gaps: list[float] = []
        self.kl: list[float] = []
        self.worst = ""

    def add(self, known: Known, answer: dict[str, Any], what: str) -> None:
        ours = np.array(answer["output_ids"], dtype=np.int64)
        differ = np.flatnonzero(ours != known.output[: len(ours)])
        upto = int(differ[0]) + 1 if len(differ) else len(ours)
        self.answers += 1
        self.tokens += upto
        if len(differ):
            row = known.logprobs[upto - 1]
            self.gaps.append(float(row[known.output[upto - 1]] - row[ours[upto - 1]]))
            if self.gaps[-1] == max(self.gaps):
                self.worst = f"{what}: prompt of {len(known.prompt)}, output token {upto - 1}"
        top = answer["meta_info"].get("output_top_logprobs")
        for position, one in enumerate((top or [])[:upto]):
            stock = known.logprobs[position].astype(np.float64)
            self.kl.append(float((np.exp(stock) * (stock - distribution(one, self.vocabulary))).sum()))

    def summary(self) -> dict[str, Any]:
        kl = np.array(self.kl or [np.nan])
        return {
            "answers": self.answers,
            "tokens_compared": self.tokens,
            "answers_that_differ": len(self.gaps),
            "largest_gap": max(self.gaps, default=0.0),
            "largest_gap_at": self.worst,
            "kl_tokens": len(self.kl),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.percentile(kl, 99)),
        }


class Load:
    """Requests of all kinds, so many at once, until the time is up. Use on the engine's own event loop."""

    def __init__(self, engine: Any, known: list[Known], *, vocabulary: int, too_long: int, at_once: int) -> None:
        self.engine, self.known = engine, known
        self.too_long, self.at_once = too_long, at_once
        self.random = random.Random(11)
        self.judge = Judge(vocabulary)
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.sent = self.retractions = 0

    async def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds

        async def worker() -> None:
            while time.monotonic() < deadline:
                self.sent += 1
                kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
                rid = f"soak-{self.sent:09d}"  # of one width: SGLang aborts by prefix
                try:
                    await asyncio.wait_for(self._one(kind, rid), ANSWER_LIMIT_S)
                except TimeoutError:
                    self.problems.append(f"{kind} {rid}: no answer within {ANSWER_LIMIT_S} s")

        await asyncio.gather(*(worker() for _ in range(self.at_once)))

    async def _one(self, kind: str, rid: str) -> None:
        known = self.random.choice(self.known)
        tokens = self.random.randint(1, len(known.output))
        prompt = (known.prompt * self.too_long)[: self.too_long] if kind == "too_long" else known.prompt
        in_full = kind == "plain" and self.random.randrange(IN_FULL) == 0
        arguments: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        if in_full:
            arguments |= {
                "return_logprob": True,
                "logprob_start_len": -1,
                "top_logprobs_num": self.judge.vocabulary,
            }
        if kind == "samples":
            arguments["sampling_params"]["n"] = 2
        else:
            arguments["rid"] = rid
        aborting = asyncio.create_task(self._abort(rid)) if kind == "abort" else None
        try:
            if kind == "stream":
                chunks = await self.engine.async_generate(**arguments, stream=True)
                answer: Any = [chunk async for chunk in chunks][-1]
            else:
                answer = await self.engine.async_generate(**arguments)
        except ValueError as refusal:
            self._count(kind, "refused", rid, str(refusal))
            return
        finally:
            if aborting is not None:
                await aborting
        for one in answer if isinstance(answer, list) else [answer]:
            meta = one["meta_info"]
            self.retractions += meta.get("num_retractions") or 0
            outcome = meta["finish_reason"]["type"]
            self._count(kind, outcome, rid, str(meta["finish_reason"]))
            if kind != "too_long":
                self.judge.add(known, one, f"{kind} {rid}")
            if outcome == "length" and len(one["output_ids"]) != tokens:
                self.problems.append(f"{kind} {rid}: {len(one['output_ids'])} of {tokens} tokens")

    async def _abort(self, rid: str) -> None:
        for _ in range(3):  # one that overtakes its request, or comes after its end, hits nothing
            await asyncio.sleep(self.random.choice([0.0, 0.005, 0.05, 0.3]))
            self.engine.tokenizer_manager.abort_request(rid)

    def _count(self, kind: str, outcome: str, rid: str, detail: str) -> None:
        self.outcomes[f"{kind}: {outcome}"] += 1
        expected = {"too_long": {"refused", "abort"}, "abort": {"length", "abort"}}.get(kind, {"length"})
        if outcome not in expected:
            self.problems.append(f"{kind} {rid}: {outcome} {detail[:200]}")
