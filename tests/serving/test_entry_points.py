# SPDX-License-Identifier: Apache-2.0
"""The other ways in: `sglang.Engine`, another model family, reading by pages.

`sglang serve` is one of the arms of test_exact.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.serving.conftest import AMPLE_POOL
from tests.support.checks import assert_same_outputs, unharmed
from tests.support.golden import Golden, stock_server
from tests.support.server import STRICT, Server, environment

ENGINE = """
import json, sys, sglang

if __name__ == "__main__":  # SGLang spawns processes that import this file again
    model, prompts = sys.argv[1], json.loads(sys.argv[2])
    engine = sglang.Engine(
        model_path=model, kv_backend="vattn", page_size=16, device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", grammar_backend="none", dtype="float32", context_length=4096,
        disable_cuda_graph=True, max_total_tokens=8192, log_level="info",
    )
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    answers = [engine.generate(input_ids=prompt, sampling_params=greedy) for prompt in prompts]
    state = engine.get_server_info()["internal_states"][0]["vattn"]
    engine.shutdown()
    print("RESULT", json.dumps([[(a["output_ids"], a["meta_info"]["cached_tokens"]) for a in answers], state]))
"""


def test_engine(llama: Path, golden: Golden, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    first = list(range(100))
    prompts = [first, [*first, 7, 8, 9], first[:40]]
    done = subprocess.run(
        ["timeout", "--kill-after=10", "240", sys.executable, str(script), str(llama), json.dumps(prompts)],
        cwd=tmp_path,
        env=environment(STRICT),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr
    answers, state = json.loads(lines[0].removeprefix("RESULT "))
    assert [tuple(output) for output, _ in answers] == [golden.output(prompt, 12) for prompt in prompts]
    assert [cached for _, cached in answers] == [0, 100, 39]
    assert state["page_size"] == 16
    assert state["pages_aliased"] == 100 // 16 + 39 // 16


def test_another_model_read_by_pages(qwen2: Path, tmp_path: Path) -> None:
    """Qwen2, against its own stock server; `--vattn-read pages` never uses the rows."""
    flags = ["--kv-backend=vattn", "--vattn-read=pages", "--page-size=16", AMPLE_POOL]
    with stock_server(qwen2, tmp_path / "stock") as stock:
        cases = Golden(lambda: stock, tmp_path)["stress"]
    with Server(qwen2, tmp_path / "vattn", flags, env=STRICT) as server, unharmed(server):
        answers = server.many([(case.prompt, case.new_tokens) for case in cases], at_once=16)
        assert_same_outputs(cases, answers)
        counters = server.vattn()
        assert counters["batches_rows"] == 0
        assert counters["batches_pages"] > 0
