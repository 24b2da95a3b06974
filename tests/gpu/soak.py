# SPDX-License-Identifier: Apache-2.0
"""Minutes of mixed requests with too little of everything, then idle: outputs right, nothing lost.

    python -m tests.gpu.soak --minutes 0  # stock's part
    python -m tests.gpu.soak --minutes 8.5 --out build/soak/soak.json

Plain requests, samples, streams, aborts, requests longer than the pool; decodes retracted by SGLang's own test switch;
so few rows that each is unmapped and mapped again under running kernels all the time; SGLang's strict checks on.
Stock SGLang at page size 1 answers every prompt first; then it serves the same load for a while, which tells how much
batching alone changes its answers (the noise). Where ours first differs from stock, stock must have been near a tie:
within four times the largest gap of the noise. KL of whole distributions within 1.5 times the noise.

Stock's part is done once for a scratch folder. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.gpu import jobs, soak_load
from tests.support.server import HARMLESS, RECORD, STRICT, TROUBLE
from tests.support.tiny_model import VOCABULARY, write_tiny_model

CHECK_EVERY_S = 20.0  # all of the plugin's own checks, while requests run
IDLE_LIMIT_S = 20.0
OUTPUT = 48  # tokens known of each answer
GAP_LIMIT, KL_LIMIT = 4.0, 1.5  # times the noise
GROWTH_LIMIT = 300 << 20  # bytes of all processes, after the first minute
ENV = {**STRICT, "VATTN_TEST_INTEGRITY": "1", "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
ENGINES: dict[str, dict[str, Any]] = {
    "cuda": {
        "attention_backend": "fa3",
        "dtype": "bfloat16",
        "context_length": 16384,
        "max_total_tokens": 12288,  # 96 pages of 128, or 192 of 64: a third of what runs at once wants
        "max_running_requests": 32,
        "chunked_prefill_size": 1024,
        "mem_fraction_static": 0.9,
        "cuda_graph_max_bs_decode": 32,
        "cuda_graph_max_bs_prefill": 1024,
    },
    "cpu": {
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "float32",
        "context_length": 4096,
        "max_total_tokens": 2048,
        "max_running_requests": 16,
        "chunked_prefill_size": 64,
        "disable_cuda_graph": True,
    },
}
# Few graphs, for a sanitizer: it looks at every kernel that is captured.
SHORT: dict[str, Any] = {"cuda_graph_bs_decode": [8, 32], "cuda_graph_backend_prefill": "disabled"}
COMMON = {
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "random_seed": 0,
    "schedule_conservativeness": 0.3,
    "log_level": "info",
}
SHARE_SOON = {"VATTN_SHARED_DECODE_BYTES": str(1 << 20)}  # groups of requests read 256 tokens of a prefix once
PHASES: dict[str, dict[str, Any]] = {
    "stock": {"page_size": 1},
    "vattn": {"kv_backend": "vattn", "vattn_rows": 24},
}
VATTN_ON_CPU = {"page_size": 16, "vattn_rows": 10}


class Phase:
    """One engine in a process of its own (`--phase`)."""

    def __init__(self, args: argparse.Namespace) -> None:
        import sglang

        self.args, self.scratch = args, Path(args.scratch)
        on_cpu = args.device == "cpu"
        self.vocabulary = VOCABULARY if on_cpu else jobs.VOCABULARY
        extra = VATTN_ON_CPU if on_cpu and args.phase == "vattn" else {}
        short = SHORT if args.short else {}
        options = {**COMMON, **ENGINES[args.device], **PHASES[args.phase], **extra, **short}
        self.engine = sglang.Engine(model_path=str(self.scratch / "model"), **options)
        self.too_long = options["max_total_tokens"] + 500
        self.longest = options["max_total_tokens"] // 6
        self.report: dict[str, Any] = {"load_s": 0.0, "problems": [], "checks": 0}

    def run(self) -> None:
        known_file = self.scratch / "known.npz"
        if self.args.phase == "stock":
            soak_load.save_known(known_file, self.ask_stock())
        known = soak_load.load_known(known_file)
        load = soak_load.Load(
            self.engine, known, vocabulary=self.vocabulary, too_long=self.too_long, at_once=self.args.at_once
        )
        loop = self.engine.loop
        before, began = self.resident_bytes(), time.monotonic()
        while (left := self.args.seconds - (time.monotonic() - began)) > 0:
            loop.run_until_complete(self.serve(load, min(left, 60)))
            if self.report["load_s"] == 0:  # what is set up once is set up by now
                before = self.resident_bytes()
            self.report["load_s"] = time.monotonic() - began
        self.report |= {
            "requests": load.sent,
            "outcomes": dict(sorted(load.outcomes.items())),
            "retractions": load.retractions,
            "judged": load.judge.summary(),
            "grown_bytes": self.resident_bytes() - before,
        }
        self.report["problems"] += load.problems
        if self.args.phase == "vattn":
            self.report["counters"] = loop.run_until_complete(self.when_idle())
        (self.scratch / f"{self.args.phase}.json").write_text(json.dumps(self.report, indent=1))
        self.engine.shutdown()

    def ask_stock(self) -> list[soak_load.Known]:
        """Every prompt once, eight at a time: tokens and whole distributions."""
        highest = 256 if self.args.device == "cpu" else jobs.NAN_TOKEN
        prompts = soak_load.make_prompts(self.args.prompts, self.longest, highest)
        known = []
        for first in range(0, len(prompts), 8):
            group = prompts[first : first + 8]
            answers = self.engine.generate(
                input_ids=group,
                sampling_params={"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True},
                return_logprob=True,
                logprob_start_len=-1,
                top_logprobs_num=self.vocabulary,
            )
            for prompt, answer in zip(group, answers, strict=True):
                top = answer["meta_info"]["output_top_logprobs"]
                rows = np.stack([soak_load.distribution(one, self.vocabulary) for one in top])
                known.append(soak_load.Known(prompt, np.array(answer["output_ids"], dtype=np.int64), rows))
        return known

    async def serve(self, load: soak_load.Load, seconds: float) -> None:
        """A stretch of load; the plugin's own checks run meanwhile."""
        serving = asyncio.create_task(load.run(seconds))
        while self.args.phase == "vattn":
            await asyncio.wait([serving], timeout=CHECK_EVERY_S)
            if serving.done():
                break
            state = await self.state()
            self.report["checks"] += 1
            self.report["problems"] += [f"under load: {text}" for text in state["problems"]]
        await serving

    async def state(self) -> dict[str, Any]:
        """All that the scheduler's process knows, and what its checks find."""
        from sglang.srt.managers.io_struct import GetInternalStateReq

        from sglang_vattn.observe import STATE_RID

        manager = self.engine.tokenizer_manager
        manager.auto_create_handle_loop()
        answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=STATE_RID))
        whole: dict[str, Any] = answers[0].internal_state["vattn"]
        return whole

    async def when_idle(self) -> dict[str, Any]:
        """Flush; then every page is free, every row clean, no mapping left, the guard page zero."""
        deadline = time.monotonic() + IDLE_LIMIT_S
        while True:
            flushed = await self.engine.tokenizer_manager.flush_cache()
            state = await self.state()
            facts: dict[str, Any] = state["facts"]
            left = {name: facts[name] for name in ("private", "protected", "evictable", "reserved", "requests")}
            left |= {name: facts[name] for name in ("rows_live", "rows_retired", "rows_waiting", "mappings", "errors")}
            left["pages lost"] = facts["num_pages"] - facts["free"]
            if flushed.success and not any(left.values()):
                break
            if time.monotonic() > deadline:
                self.report["problems"].append(f"idle, flushed ({flushed.success}), and left are {left}")
                break
            await asyncio.sleep(0.5)
        self.report["problems"] += [f"idle: {text}" for text in state["problems"]]
        return facts

    def resident_bytes(self) -> int:
        """Of the engine's own processes, without what is shared; this one keeps what it compares."""
        family = psutil.Process().children(recursive=True)
        return sum(each.memory_info().rss - each.memory_info().shared for each in family)


def run_phase(args: argparse.Namespace, phase: str, seconds: float) -> dict[str, Any]:
    """A phase in its own process; what its log says counts, too."""
    scratch = Path(args.scratch)
    result = scratch / f"{phase}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.soak", "--phase", phase, "--seconds", str(seconds)]
    command += ["--scratch", str(scratch), "--device", args.device]
    command += ["--at-once", str(args.at_once), "--prompts", str(args.prompts), *(["--short"] if args.short else [])]
    env = {**os.environ, **ENV, **SHARE_SOON}
    began = time.monotonic()
    with (scratch / f"{phase}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env).returncode
    text = (scratch / f"{phase}.log").read_text(errors="replace")
    if not result.exists():
        sys.exit(f"{phase}: exit code {code}; the end of its log:\n{text[-4000:]}")
    report: dict[str, Any] = json.loads(result.read_text())
    bad = [record for record in RECORD.split(text) if TROUBLE.search(record) and HARMLESS not in record]
    report["problems"] += [f"log: {record[:300]}" for record in bad[:3]]
    report["wall_s"] = time.monotonic() - began
    result.write_text(json.dumps(report, indent=1))
    return report


def verdict(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What is wrong; empty if all is well."""
    wrong = [*stock["problems"], *ours["problems"]]
    noise, judged, counters = stock["judged"], ours["judged"], ours["counters"]
    if judged["largest_gap"] > GAP_LIMIT * noise["largest_gap"]:
        wrong.append(
            f"an answer left stock's where that was no tie: {judged['largest_gap']}, {judged['largest_gap_at']}"
        )
    for key in ("kl_mean", "kl_p99"):
        if not judged[key] <= KL_LIMIT * noise[key] + 1e-9:
            wrong.append(f"{key} {judged[key]} against a noise of {noise[key]}")
    if ours["grown_bytes"] > GROWTH_LIMIT:
        wrong.append(f"memory grew by {ours['grown_bytes']} bytes")
    # Else nothing was tried.
    tried = {
        "aborts": ours["outcomes"].get("abort: abort", 0),
        "retractions": ours["retractions"],
        "batches by rows": counters["batches_rows"],
        "rows used again": counters["unmap_calls"] - counters["num_rows"],
        "refusals": ours["outcomes"].get("too_long: refused", 0) + ours["outcomes"].get("too_long: abort", 0),
    }
    wrong += [f"tried no {name}" for name, count in tried.items() if count <= 0]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--scratch", default="build/soak")
    parser.add_argument("--out", default="build/soak/soak.json")
    parser.add_argument("--device", default="cuda", choices=list(ENGINES))
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--noise-seconds", type=float, default=90, help="of the same load on stock SGLang")
    parser.add_argument("--short", action="store_true", help="few CUDA graphs: for compute-sanitizer")
    parser.add_argument("--phase", choices=list(PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        Phase(args).run()
        return
    scratch = Path(args.scratch)
    if not (scratch / "model").exists():
        scratch.mkdir(parents=True, exist_ok=True)
        if args.device == "cpu":
            write_tiny_model(scratch / "model")
        else:
            jobs.write_model(scratch / "model", context=ENGINES["cuda"]["context_length"])
    done = scratch / "stock.json"
    stock = json.loads(done.read_text()) if done.exists() else run_phase(args, "stock", args.noise_seconds)
    if args.minutes == 0:
        print(json.dumps(stock, indent=1))
        return
    ours = run_phase(args, "vattn", args.minutes * 60)
    wrong = verdict(stock, ours)
    summary = {
        "command": f"python -m tests.gpu.soak {' '.join(sys.argv[1:])}",
        "wrong": wrong,
        "noise_of_stock": stock["judged"],
        **{name: value for name, value in ours.items() if name != "problems"},
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
