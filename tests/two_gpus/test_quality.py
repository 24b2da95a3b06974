# SPDX-License-Identifier: Apache-2.0
"""Two GPUs of one host: output distributions against stock TP=2, and equal decisions though one rank maps late.

    python -m pytest --noconftest -o pythonpath= -o addopts= tests/two_gpus -s

Here decode graphs and custom all-reduce are real. If the ranks ever replayed different graphs, one would add up what
the other's buffers held some steps ago: `late` would be far outside the noise, and `assert_equal_decisions` would name
the first step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.gpu import jobs, test_quality
from tests.gpu.test_quality import BASE, NOISE, SHARE_ALWAYS, STOCK, divergences, summary
from tests.parallel.support import PLUGIN, assert_equal_decisions, traces
from tests.support.server import python_path

BOTH = {"tp_size": 2}
LATE = [{}, {"VATTN_TEST_MAP_DELAY_S": "0.005"}]


def traced(folder: Path, of_ranks: list[dict[str, str]]) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "PYTHONPATH": python_path(PLUGIN),
        "SGLANG_PLUGINS": "ranks,vattn",
        "VATTN_TRACE": str(folder),
        "VATTN_RANK_ENVIRONMENT": json.dumps(of_ranks),
    }


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("VATTN_GPU_SCRATCH") or tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def outputs(scratch: Path) -> tuple[dict[str, Any], int]:
    jobs.write_model(scratch / "model")
    groups = jobs.prompt_groups(count=140)
    arms: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        name: ({**arguments, **BOTH}, {}) for name, arguments in STOCK.items()
    }
    ours = {"kv_backend": "vattn", **BOTH}
    arms["auto"] = (ours, {})
    arms["late"] = (ours, SHARE_ALWAYS | traced(scratch / "late", LATE))
    spec = jobs.spec(scratch / "model", groups, context_length=16384)
    with mock.patch.object(test_quality, "AT_ONCE", len(arms)):
        return test_quality.run_arms(scratch, spec, arms, gpus_each=2), sum(map(len, groups))


@pytest.mark.parametrize("arm", ["auto", "late"])
def test_outputs_stay_within_the_noise_of_stock(outputs: tuple[dict[str, Any], int], arm: str) -> None:
    results, count = outputs
    assert arm in results, "the engine failed; its log is above"
    noise = [summary(divergences(results[BASE], results[name], count)) for name in NOISE]
    ours = summary(divergences(results[BASE], results[arm], count))
    print(f"\nTP=2, KL against stock page 1: noise {noise}, {arm} {ours}")
    assert ours["tokens"] > 1000
    for key in ("mean", "p99"):
        assert ours[key] <= 1.5 * max(each[key] for each in noise), (arm, key)


def test_the_late_rank_decides_as_the_other(outputs: tuple[dict[str, Any], int], scratch: Path) -> None:
    ranks = traces(scratch / "late")
    assert len(ranks) == 2
    steps = assert_equal_decisions(ranks)
    timing = [[step["timing"]["ready_here"] for step in rank] for rank in ranks]
    apart = sum(a != b for a, b in zip(*timing, strict=False))
    variants = [step["decided"]["variant"] for step in ranks[0]]
    print(f"\n{steps} forwards, {apart} with other rows mapped on the other rank; {set(variants)}")
    assert apart > steps / 50 and len(set(variants)) > 1


def test_custom_all_reduce_stays_on(outputs: tuple[dict[str, Any], int], scratch: Path) -> None:
    for arm in (BASE, "auto", "late"):
        log = (scratch / f"{arm}.log").read_text()
        assert "All Reduce config: symmetric_memory" in log and "is disabled because" not in log, arm
