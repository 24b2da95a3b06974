# SPDX-License-Identifier: Apache-2.0
"""One engine, one list of jobs, every output token's distribution: an arm of the comparison, in its own process.

    python tests/gpu/arm.py JOBS.json OUT.npz '{"page_size": 1}'

A job is {"ids": [...], "output": n}. OUT holds, for job i: tokens_i int64 (n,), logprobs_i float32 (n, vocabulary),
and cached int64 (jobs,).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def distribution(top: list[Any], vocabulary: int) -> np.ndarray:
    """The log-probabilities that SGLang lists for one token, (value, token id, text), in order of token id."""
    row = np.full(vocabulary, -np.inf, dtype=np.float32)
    for value, token, _ in top:
        row[token] = value
    return row


def main() -> None:
    import sglang

    from tests.gpu import jobs

    jobs_file, out_file, arguments = sys.argv[1:4]
    options = json.loads(arguments)
    with open(jobs_file) as stream:
        spec = json.load(stream)
    vocabulary = spec["vocabulary"]
    groups = jobs.with_nan(spec["groups"]) if options.pop("nan", False) else spec["groups"]
    engine = sglang.Engine(**{**spec["engine"], **options})
    out: dict[str, np.ndarray] = {}
    cached: list[int] = []
    for group in groups:  # a group is sent at once, groups one after the other
        answers = engine.generate(
            input_ids=[job["ids"] for job in group],
            sampling_params=[{"temperature": 0, "max_new_tokens": job["output"], "ignore_eos": True} for job in group],
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=vocabulary,
        )
        for job, answer in zip(group, answers, strict=True):
            if job.get("skip"):
                continue
            index = len(cached)
            out[f"tokens_{index}"] = np.array(answer["output_ids"], dtype=np.int64)
            out[f"logprobs_{index}"] = np.stack(
                [distribution(top, vocabulary) for top in answer["meta_info"]["output_top_logprobs"]]
            )
            cached.append(answer["meta_info"]["cached_tokens"])
    info = engine.get_server_info()["internal_states"][0].get("vattn") or {}
    engine.flush_cache()
    np.savez(out_file, cached=np.array(cached, dtype=np.int64), vattn=json.dumps(info), **out)
    engine.shutdown()


if __name__ == "__main__":
    main()
