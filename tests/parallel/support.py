# SPDX-License-Identifier: Apache-2.0
"""Two ranks of one server on the host, and what each of them decided."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.server import NO_PLUGINS, STRICT, Server, python_path

PLUGIN = Path(__file__).resolve().parent / "plugin"
TWO_RANKS = "--tp-size=2"
# SGLang asks for it where ranks outnumber NUMA nodes; with this build of it nothing is bound.
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

Job = tuple[list[int], int]  # prompt, new tokens


def two_ranks(
    model: Path, folder: Path, flags: Sequence[str], of_ranks: Sequence[dict[str, str]], **env: str
) -> Server:
    """A server of ours; `of_ranks`: environment variables of each rank alone, `env`: of all. Traces go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    plugin = {
        "PYTHONPATH": python_path(PLUGIN),
        "SGLANG_PLUGINS": "ranks,vattn",
        "VATTN_TRACE": str(folder),
        "VATTN_RANK_ENVIRONMENT": json.dumps(list(of_ranks)),
    }
    return Server(model, folder, ["--kv-backend=vattn", *flags], env=STRICT | CORES | plugin | env)


def stock_two_ranks(model: Path, folder: Path) -> Server:
    flags = [TWO_RANKS, "--page-size=1", "--max-total-tokens=32768"]
    return Server(model, folder, flags, env=CORES | NO_PLUGINS)


def traces(folder: Path) -> list[list[dict[str, Any]]]:
    """Of each rank, a record a forward. The last line may be half written."""
    out = []
    for path in sorted(folder.glob("rank*.jsonl")):
        text = path.read_text()
        out.append([json.loads(line) for line in text[: text.rfind("\n")].splitlines()])
    return out


def assert_equal_decisions(ranks: Sequence[list[dict[str, Any]]]) -> int:
    """Step by step; returns the steps compared."""
    first, *others = ranks
    for rank, other in enumerate(others, 1):
        assert abs(len(first) - len(other)) <= 1, "a rank ran other forwards"
        for step, (a, b) in enumerate(zip(first, other, strict=False)):
            differ = {
                key: (a["decided"][key], b["decided"][key])
                for key in a["decided"]
                if a["decided"][key] != b["decided"][key]
            }
            assert not differ, f"at forward {step}, rank 0 against rank {rank}: {differ}"
    return min(map(len, ranks))


def gap(server: Server, ids: Sequence[int]) -> float:
    """How far the two likeliest next tokens are apart, in log-probability."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    asked = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    first, second = json.loads(server.text("/generate", asked))["meta_info"]["output_top_logprobs"][0]
    return float(first[0] - second[0])


def mixed(count: int, seed: int = 11) -> list[Job]:
    """Of six documents, cut anywhere, or nothing in common; answers of 1 to 24 tokens."""
    rng = random.Random(seed)
    documents = [[rng.randrange(256) for _ in range(length)] for length in (40, 90, 150, 200, 260, 330)]
    jobs = []
    for _ in range(count):
        document = rng.choice(documents) if rng.random() < 0.85 else []
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        jobs.append((document[: rng.randrange(len(document) + 1)] + own, rng.choice((1, 4, 8, 16, 24))))
    return jobs
