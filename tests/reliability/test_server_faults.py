# SPDX-License-Identifier: Apache-2.0
"""Driver calls that fail in a real server: whoever they are for is served by pages; the server starts, or says why not.

Nobody's output changes and nobody waits: contiguity is a cache. The same at every k of a scripted serve, with every
content compared: test_driver_faults.py.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.reliability.conftest import SMALL_POOL, SOAK
from tests.reliability.load import OUTPUT, Known
from tests.support.checks import unharmed
from tests.support.server import STRICT, Server, ServerError

UP_TO = 60 if SOAK else 10  # map, set_access and unmap each fail at their 1st, 2nd, .. next call
ROUNDS = 60
LIMIT_S = 30


def serve_all(server: Server, known: list[Known]) -> dict[str, int]:
    """Every prompt, 16 at once, against stock's answers; what the counters rose by."""
    before = server.vattn()
    answers = server.many([(each.prompt, OUTPUT) for each in known], at_once=16)
    assert [answer.output for answer in answers] == [each.output for each in known]
    after = server.vattn()
    return {name: after[name] - before[name] for name in ("errors", "batches_rows", "batches_pages", "pages_mapped")}


def test_every_call_fails_at_every_k_under_load(llama: Path, known: list[Known], tmp_path: Path) -> None:
    env = STRICT | {"VATTN_TEST_FAULTS": str(UP_TO), "VATTN_TEST_INTEGRITY": "1"}
    with Server(llama, tmp_path, [*SMALL_POOL, "--vattn-page"], env=env) as server, unharmed(server):
        for _ in range(ROUNDS):
            serve_all(server, known)
            counters = server.vattn()
            if counters["errors"] == 3 * UP_TO:
                break
        assert counters["errors"] == 3 * UP_TO
        assert counters["batches_rows"] > 0 and counters["batches_pages"] > 0 and counters["batches_waited"] == 0
        # It is over: who comes later finds rows, and in the end everything is in its place.
        rose = serve_all(server, known)
        assert rose["errors"] == 0 and rose["pages_mapped"] > 0
        assert rose["batches_rows"] > rose["batches_pages"]
        deadline = time.monotonic() + LIMIT_S
        while (counters := server.vattn())["rows_clean"] < counters["num_rows"] - 1 or counters["mappings"]:
            assert time.monotonic() < deadline, counters
            time.sleep(0.2)
        time.sleep(0.6)  # the state is asked for at most twice a second
        assert json.loads(server.text("/vattn/state"))["ranks"][0]["problems"] == []


@pytest.mark.parametrize("call", ["create", "set_access"])
def test_a_start_without_memory_ends_with_a_reason(llama: Path, tmp_path: Path, call: str) -> None:
    """Another process may take the memory after SGLang has looked how much there is."""
    server = Server(llama, tmp_path, SMALL_POOL, env=STRICT | {"VATTN_TEST_FAIL_AT_START": call})
    with pytest.raises(ServerError, match=r"the server ended with -?[1-9]"):
        server.start()
    assert f"{call}: injected fault. If memory is short" in server.log()
    assert "lower --mem-fraction-static or --max-total-tokens" in server.log()
    assert "ready to roll" not in server.log()
