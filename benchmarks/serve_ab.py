# SPDX-License-Identifier: Apache-2.0
"""Stock SGLang against vattn: five prefix workloads, Llama-3-8B geometry with dummy weights.

    python -m benchmarks.serve_ab --out benchmarks/results/h200/serve_ab.json
    python -m benchmarks.serve_ab --tp-size 2 --out benchmarks/results/h200x2/serve_ab.json

Each arm is an engine of its own in a process of its own, one after the other on the same GPU. Per workload:
cold prefill (an empty cache), then rounds of (all hits, one output token), (all hits, `OUTPUT` tokens), and lone
hits. The decode step is the difference of the two hit rounds. Every figure is the median over the rounds; the
spread is (max - min) / median. Every single measurement is kept beside the table, under "raw".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import command, machine, median, spread, versions

OUTPUT = 128  # tokens a request in the decode rounds
QUESTION = 64  # tokens a request has of its own
LONE = 20  # hits one by one in a round


class Workload(NamedTuple):
    name: str
    documents: int
    document_tokens: int
    requests: int


WORKLOADS = (
    Workload("prefix_8k_x64", 1, 8192, 64),
    Workload("docs_8x8k_x64", 8, 8192, 64),
    Workload("prefix_2k_x128", 1, 2048, 128),
    Workload("prefix_32k_x32", 1, 32000, 32),
    Workload("unique_4k_x32", 32, 4096, 32),
)
ARMS: dict[str, dict[str, Any]] = {
    "stock_page1": {"page_size": 1},
    "stock_page128": {"page_size": 128},
    "vattn": {"kv_backend": "vattn"},
    # Not in the table: what each way of reading costs by itself.
    "vattn_rows": {"kv_backend": "vattn", "vattn_shared_decode": "off"},
    "vattn_pages": {"kv_backend": "vattn", "vattn_shared_decode": "off", "vattn_read": "pages"},
    "vattn_scrub_off": {"kv_backend": "vattn", "vattn_scrub": "off"},
}
RANKS_AGREE_ON = (
    *("num_pages", "free", "private", "evictable", "protected", "hit_tokens", "aliased_tokens", "copied_tokens"),
    *("evicted_pages", "batches_rows", "batches_pages", "batches_shared"),
)
TABLE_ARMS = ["stock_page1", "stock_page128", "vattn"]
# The same for every arm. Graph sizes are limited alike, since capturing them is most of an engine's start.
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.85,
    "context_length": 40960,
    "max_running_requests": 256,
    "cuda_graph_max_bs_decode": 128,
    "log_level": "info",
    "skip_server_warmup": True,
}
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


class Arm:
    """One engine and what it measured. Runs in a process of its own."""

    def __init__(self, name: str, model: str, rounds: int, extra: dict[str, Any]) -> None:
        import sglang

        self.name, self.rounds = name, rounds
        start = time.perf_counter()
        self.engine = sglang.Engine(model_path=model, **{**ENGINE, **ARMS[name], **extra})
        self.start_s = time.perf_counter() - start
        self.random = random.Random(0)
        self.run([self.tokens(2000)] * 2, 8)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(10, 120000) for _ in range(count)]

    def run(self, prompts: list[list[int]], output: int) -> tuple[float, int]:
        """Seconds until all prompts are answered, and the tokens that came from the cache."""
        start = time.perf_counter()
        answers = self.engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        )
        seconds = time.perf_counter() - start
        return seconds, sum(answer["meta_info"]["cached_tokens"] for answer in answers)

    def counters(self) -> dict[str, int]:
        states = self.engine.get_server_info()["internal_states"]
        return dict(states[0].get("vattn") or {})

    def ranks(self) -> list[dict[str, int]]:
        """Counters of every tensor-parallel rank of ours; empty for one rank, and for stock."""
        return list(self.engine.get_server_info()["internal_states"][0].get("vattn_ranks") or [])

    def measure(self, load: Workload) -> dict[str, Any]:
        raw: dict[str, list[float]] = {"cold_prefill_s": [], "hit_prefill_s": [], "with_output_s": [], "one_hit_s": []}
        before, ranks_before = self.counters(), self.ranks()
        cached = 0
        for _ in range(self.rounds):
            documents = [self.tokens(load.document_tokens) for _ in range(load.documents)]
            self.engine.flush_cache()
            time.sleep(0.3)
            raw["cold_prefill_s"].append(self.run([doc + self.tokens(QUESTION) for doc in documents], 1)[0])
            raw["hit_prefill_s"].append(self.run(self.questions(load, documents), 1)[0])
            seconds, cached = self.run(self.questions(load, documents), OUTPUT)
            raw["with_output_s"].append(seconds)
            raw["one_hit_s"] += [self.run([documents[0] + self.tokens(QUESTION)], 1)[0] for _ in range(LONE)]
        after = self.counters()
        steps = [
            (total - hits) / (OUTPUT - 1) * 1e3
            for total, hits in zip(raw["with_output_s"], raw["hit_prefill_s"], strict=True)
        ]
        raw["decode_step_ms"] = steps
        out_tok_s = [load.requests * OUTPUT / seconds for seconds in raw["with_output_s"]]
        return {
            "workload": load.name,
            "arm": self.name,
            "cold_prefill_s": median(raw["cold_prefill_s"]),
            "hit_prefill_s": median(raw["hit_prefill_s"]),
            "decode_step_ms": median(steps),
            "out_tok_s": median(out_tok_s),
            "one_hit_ttft_ms": median(raw["one_hit_s"]) * 1e3,
            "engine_start_s": self.start_s,
            "unmap_calls": after.get("unmap_calls", 0) - before.get("unmap_calls", 0),
            "unmap_calls_running": after.get("unmap_calls_running", 0) - before.get("unmap_calls_running", 0),
            "map_calls": after.get("map_calls", 0) - before.get("map_calls", 0),
            "cached_share": cached / (load.requests * (load.document_tokens + QUESTION)),
            "spread": {key: spread(values) for key, values in raw.items()},
            "raw": raw,
            "counters": {key: value - before.get(key, 0) for key, value in after.items()},
            "ranks": [
                {key: value - old.get(key, 0) for key, value in new.items()}
                for new, old in zip(self.ranks(), ranks_before, strict=True)
            ],
        }

    def profile(self, load: Workload, folder: str) -> None:
        """Leave a torch profile of some decode steps of this workload in the folder; nothing of it is measured."""
        documents = [self.tokens(load.document_tokens) for _ in range(load.documents)]
        self.run(self.questions(load, documents), 1)
        self.engine.start_profile(output_dir=os.path.join(folder, self.name), activities=["GPU"])
        self.run(self.questions(load, documents), OUTPUT // 4)
        self.engine.stop_profile()

    def questions(self, load: Workload, documents: list[list[int]]) -> list[list[int]]:
        return [documents[i % load.documents] + self.tokens(QUESTION) for i in range(load.requests)]


def run_arm(args: argparse.Namespace) -> None:
    arm = Arm(args.arm, args.model, args.rounds, {"tp_size": args.tp_size, **json.loads(args.extra)})
    rows = []
    for load in WORKLOADS:
        if load.name in args.workloads:
            rows.append(arm.measure(load))
            print(format_row(rows[-1]), flush=True)
            Path(args.out).write_text(json.dumps(rows))
    if args.profile:
        arm.profile(next(load for load in WORKLOADS if load.name in args.workloads), os.path.abspath(args.profile))
    arm.engine.shutdown()


def format_row(row: dict[str, Any]) -> str:
    return (
        f"{row['workload']:<16} {row['arm']:<14} cold {row['cold_prefill_s']:.3f} s  "
        f"hits {row['hit_prefill_s']:.3f} s  step {row['decode_step_ms']:6.2f} ms  "
        f"{row['out_tok_s']:7.0f} tok/s  one hit {row['one_hit_ttft_ms']:.1f} ms  "
        f"maps {row['map_calls']} unmaps {row['unmap_calls']}, of them {row['unmap_calls_running']} while requests ran"
    )


def heading(module: str, key: Sequence[str]) -> dict[str, Any]:
    """What every result file begins with; its rows follow."""
    head: dict[str, Any] = {"machine": machine("cuda"), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    return head | {"command": command(module), "key": key, "rows": []}


def write_model(scratch: str) -> Path:
    """A folder with the model's geometry; its weights are dummies."""
    model = Path(scratch, "model")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="serve_ab.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=TABLE_ARMS, choices=list(ARMS))
    parser.add_argument("--workloads", nargs="+", default=[load.name for load in WORKLOADS])
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs, by tensor parallelism")
    parser.add_argument("--profile", help="a folder for a torch profile of the first workload's decode, one an arm")
    parser.add_argument("--extra", default="{}", help="JSON: engine arguments for every arm")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        run_arm(args)
        return
    result = heading("serve_ab", ["workload", "arm"])
    out = Path(args.out).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(scratch)
        for name in args.arms:
            part = Path(scratch, f"{name}.json")
            again = [sys.executable, "-m", "benchmarks.serve_ab", *sys.argv[1:], "--arm", name]
            log = out.with_name(f"{out.stem}.{name}.log")
            with log.open("w") as stream:
                code = subprocess.run(
                    [*again, "--model", str(model), "--out", str(part)], stdout=stream, stderr=subprocess.STDOUT
                ).returncode
            if part.exists():  # a run that stops early keeps what it has
                result["rows"] += json.loads(part.read_text())
                out.write_text(json.dumps(result, indent=1))
            if code:
                print(f"{name}: exit code {code}\n" + log.read_text()[-3000:], flush=True)
    for row in result["rows"]:
        decided = [tuple(rank[key] for key in RANKS_AGREE_ON) for rank in row["ranks"]]
        if len(set(decided)) > 1:
            print(f"{row['workload']} {row['arm']}: the ranks differ in {RANKS_AGREE_ON}: {decided}")
    for row in sorted(result["rows"], key=lambda row: [load.name for load in WORKLOADS].index(row["workload"])):
        print(format_row(row))


if __name__ == "__main__":
    main()
