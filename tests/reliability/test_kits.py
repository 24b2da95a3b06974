# SPDX-License-Identifier: Apache-2.0
"""SGLang's own kits as judges, against a small pool. What cannot run, and why: docs/reliability.md."""

from __future__ import annotations

import json
import random
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reliability.conftest import SMALL_POOL, SOAK
from tests.support.checks import unharmed, until
from tests.support.golden import Golden
from tests.support.server import STRICT, Server

VOCABULARY = 256


def run_kit(server: Server, kit: type, tests: list[str], **attributes: Any) -> None:
    """These tests of a mixin, as SGLang's suites run them: in a TestCase that knows a server."""

    class Poll:
        def poll(self) -> None:
            server.assert_running()

    fields = {"base_url": server.base, "process": Poll(), "model": "default", **attributes}
    case = type(kit.__name__.removesuffix("Mixin"), (kit, unittest.TestCase), fields)
    result = unittest.TestResult()
    for name in tests:
        case(name).run(result)
    problems = [text for _, text in [*result.failures, *result.errors]]
    assert not problems, "\n".join(problems)
    assert result.testsRun == len(tests) and not result.skipped


def test_radix_tree_of_requests(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.test.kits import radix_cache_server_kit as kit

    random.seed(5)
    nodes = kit.gen_radix_tree(400 if SOAK else 50, 128 if SOAK else 48)
    for node in nodes:  # the kit's token ids are a larger model's, and its longest path longer than our context
        node["input_ids"] = [token % VOCABULARY for token in node["input_ids"]][:1200]
        node["decode_len"] = min(node["decode_len"], 200)
    monkeypatch.setattr(kit, "gen_radix_tree", lambda: nodes)
    with unharmed(small):
        kit.run_radix_attention_test(small.base)


def test_api_contract(small: Server) -> None:
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin as Kit

    tests = [
        "test_health",
        "test_health_generate",
        "test_get_server_info",
        "test_get_model_info",
        "test_openai_completion",
    ]
    run_kit(small, Kit, tests)


def test_decode(small: Server) -> None:
    from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin as Kit

    with unharmed(small):
        run_kit(small, Kit, ["test_determinism_temp_zero", "test_max_token_one"])


def test_abort_all(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit sleeps until its requests have arrived; on a busy machine some have not."""
    from sglang.test.kits import abort_timeout_kit

    kit = abort_timeout_kit.AbortAllMixin

    def arrived() -> bool:
        return small.under_way() == kit.abort_all_num_requests

    sleep = SimpleNamespace(sleep=lambda _: until(arrived, "all requests have arrived"))
    monkeypatch.setattr(abort_timeout_kit, "time", sleep)
    with unharmed(small):
        run_kit(small, kit, ["test_abort_all"], abort_all_max_new_tokens=1500)


def test_questions_at_once(small: Server, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit asks for capitals; a random model is to say what it says on stock SGLang."""
    from sglang.test.kits import basic_scheduler_stress_kit as kit

    def stock_says(question: str) -> str:
        body = {"text": kit._CONCURRENT_PREFIX + question, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
        return str(json.loads(golden.stock().text("/generate", body))["text"]).lower()

    questions = [(question, stock_says(question)) for question, _ in kit._CONCURRENT_QA]
    assert all(answer for _, answer in questions)
    monkeypatch.setattr(kit, "_CONCURRENT_QA", questions)
    with unharmed(small):
        run_kit(small, kit.BasicSchedulerStressMixin, ["test_concurrent_requests"])


@pytest.mark.parametrize("limit", ["WAITING", "RUNNING"])
def test_timeouts(llama: Path, tmp_path: Path, limit: str) -> None:
    """SGLang's own limits on how long a request waits, and on how long it runs."""
    from sglang.test.kits import abort_timeout_kit as kit

    flags = [*SMALL_POOL, "--max-running-requests=1" if limit == "WAITING" else "--max-running-requests=16"]
    env = STRICT | {f"SGLANG_REQ_{limit}_TIMEOUT": "0.5"}
    with Server(llama, tmp_path, flags, env=env) as server, unharmed(server):
        if limit == "WAITING":
            run_kit(server, kit.WaitingTimeoutMixin, ["test_waiting_timeout"], waiting_timeout_max_new_tokens=600)
        else:
            run_kit(server, kit.RunningTimeoutTwoWaveMixin, ["test_running_timeout_no_crash"], running_timeout_sleep=1)
            assert "timeout" in server.log()


def test_pause_and_resume(small: Server) -> None:
    from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin as Kit

    with unharmed(small):
        run_kit(
            small, Kit, ["test_pause_resume_in_place"], pause_num_requests=16, pause_max_new_tokens=300,
            pause_duration=1.5, pause_ignore_eos=True,
        )  # fmt: skip
