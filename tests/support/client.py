# SPDX-License-Identifier: Apache-2.0
"""A blocking client of SGLang's native HTTP routes, with a time limit on every call."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

CALL_LIMIT_S = 180.0


class Answer(NamedTuple):
    """What came back for one request (or for one sample of it)."""

    output: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finish: str  # "length", "stop" or "abort"
    meta: dict[str, Any]  # SGLang's meta_info, whole

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Answer:
        meta = body["meta_info"]
        return cls(
            output=tuple(body["output_ids"]),
            prompt_tokens=meta.get("prompt_tokens", 0),  # absent if it was aborted in the queue
            cached_tokens=meta.get("cached_tokens", 0),
            finish=(meta["finish_reason"] or {}).get("type", ""),
            meta=meta,
        )


class Client:
    """Requests are greedy, and ignore the end-of-text token unless told otherwise.

    So lengths are known. SGLang then admits a request only if all of its output will fit.
    """

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    # ---- transport
    def open(self, path: str, body: object = None, limit_s: float = CALL_LIMIT_S) -> Any:
        """The open response of one call: GET without a body, POST with one."""
        request = urllib.request.Request(
            self.base + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=limit_s)

    def text(self, path: str, body: object = None, limit_s: float = CALL_LIMIT_S) -> str:
        try:
            with self.open(path, body, limit_s) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as refusal:
            refusal.add_note(refusal.read().decode(errors="replace"))
            raise

    # ---- generation
    @staticmethod
    def _generation(ids: object, new_tokens: int, rid: object, **sampling: object) -> dict[str, Any]:
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
                **sampling,
            },
        }
        if rid is not None:
            body["rid"] = rid
        return body

    def generate(self, ids: Sequence[int], new_tokens: int, rid: str | None = None, ignore_eos: bool = True) -> Answer:
        body = self._generation(list(ids), new_tokens, rid, ignore_eos=ignore_eos)
        return Answer.parse(json.loads(self.text("/generate", body)))

    def samples(self, ids: Sequence[int], new_tokens: int, n: int) -> list[Answer]:
        """`n` samples of one prompt, asked for in one request."""
        body = self._generation(list(ids), new_tokens, None, n=n)
        return [Answer.parse(one) for one in json.loads(self.text("/generate", body))]

    def together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        """Several prompts in one request: the scheduler receives them in one step."""
        body = self._generation([list(ids) for ids in prompts], new_tokens, None)
        return [Answer.parse(one) for one in json.loads(self.text("/generate", body))]

    def stream(self, ids: Sequence[int], new_tokens: int, rid: str | None = None) -> Iterator[Answer]:
        """The growing answer, once per chunk that the server sends."""
        body = {**self._generation(list(ids), new_tokens, rid), "stream": True}
        with self.open("/generate", body) as response:
            for raw in response:
                line = raw.decode().strip()
                if line.startswith("data:") and line != "data: [DONE]":
                    yield Answer.parse(json.loads(line.removeprefix("data:")))

    def many(self, jobs: Sequence[tuple[Sequence[int], int]], at_once: int, ignore_eos: bool = True) -> list[Answer]:
        """One request per (prompt, new tokens), never more than `at_once` under way."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda job: self.generate(job[0], job[1], ignore_eos=ignore_eos), jobs))

    # ---- control
    def abort(self, rid: str) -> None:
        """Abort every request whose id *starts with* `rid`: use ids of one fixed width."""
        self.text("/abort_request", {"rid": rid})

    def flush(self, limit_s: float = 30.0) -> None:
        """Empty the prefix cache; retried, since it is refused while a request winds down."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self.text("/flush_cache", {})
                return
            except urllib.error.HTTPError as refusal:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"flush refused for {limit_s} s") from refusal
                time.sleep(0.05)

    def info(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.text("/server_info"))
        return state

    def under_way(self) -> int:
        """Requests that the scheduler has: those that decode, and those that wait."""
        [load] = json.loads(self.text("/v1/loads"))["loads"]
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    def vattn(self) -> dict[str, Any]:
        """Our counters, as the scheduler reports them (a KeyError without the flag)."""
        counters: dict[str, Any] = self.info()["internal_states"][0]["vattn"]
        return counters
