# SPDX-License-Identifier: Apache-2.0
"""Many small engines, one after the other: on the CPU in processes forked from one that has imported SGLang.

    python -m tests.support.engines SPEC.json OUT.json

A server of its own takes half a minute to start, nearly all of it imports. Here a model takes a few seconds, so every
family of models can be compared, with the flag and without. On a GPU each is a process of its own. SPEC is a list of
:class:`Run`, OUT a list of results::

    {"outputs": [[token, ..], ..], "cached": [n, ..], "together": [[token, ..], ..], "vattn": {..}, "after_flush": {..}}

``outputs`` are answers to ``requests`` one at a time, ``together`` to the same prompts at once, when all are cached.
With ``distributions``, a file of that name holds for each of the latter ``tokens_i`` and ``logprobs_i`` over the whole
vocabulary, as tests/gpu/arm.py writes them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from tests.support.zygote import import_sglang

RUN_LIMIT_S = 240.0


class Request(NamedTuple):
    """Ids; with ``follows``, behind that request's prompt and output."""

    ids: Sequence[int]
    new_tokens: int
    follows: int | None = None
    adapter: str | None = None


class Run(TypedDict):
    engine: dict[str, Any]  # arguments of sglang.Engine
    requests: Sequence[Request]
    distributions: NotRequired[tuple[str, int]]  # file, vocabulary
    setup: NotRequired[str]  # module:function, called in the engine's process before it starts
    limit_s: NotRequired[float]  # else RUN_LIMIT_S


def run_all(runs: Sequence[Run], scratch: Path, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """The results of these runs, made in a process of its own with this environment; its log is scratch/log.

    The result of an engine that failed is ``{"error": ..}``.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "spec.json").write_text(json.dumps(runs))
    with (scratch / "log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "tests.support.engines", str(scratch / "spec.json"), str(scratch / "out.json")],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=Path(__file__).resolve().parents[2],
            timeout=60 + sum(map(limit_s, runs)),  # each run is ended at its own limit
            check=False,
        ).returncode
    if code:
        raise RuntimeError(f"the engines ended with {code}; the end of their log:\n{log_of(scratch)[-6000:]}")
    results: list[dict[str, Any]] = json.loads((scratch / "out.json").read_text())
    return results


def limit_s(run: Run) -> float:
    return run.get("limit_s", RUN_LIMIT_S)


def log_of(scratch: Path) -> str:
    return (scratch / "log").read_text(errors="replace")


def _unpin() -> None:
    """SGLang's LoRA pins its host tensors, which torch cannot do without a GPU. For nobody's speed here: pin none."""
    import torch

    def unpinned(function: Any) -> Any:
        return lambda *a, pin_memory=False, **kw: function(*a, **kw)

    if not torch.cuda.is_available():
        for name in ("tensor", "empty", "zeros", "arange"):
            setattr(torch, name, unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *a, **kw: self


def _serve(run: Run) -> dict[str, Any]:
    import sglang

    if "setup" in run:
        module, function = run["setup"].split(":")
        getattr(import_module(module), function)()
    engine = sglang.Engine(**run["engine"])
    requests = [Request(*request) for request in run["requests"]]
    prompts: list[list[int]] = []
    result: dict[str, Any] = {"outputs": [], "cached": []}

    def sampling(new_tokens: int) -> dict[str, Any]:
        return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}

    for request in requests:
        before = [] if request.follows is None else prompts[request.follows] + result["outputs"][request.follows]
        prompts.append([*before, *request.ids])
        answer = engine.generate(
            input_ids=prompts[-1], sampling_params=sampling(request.new_tokens), lora_path=request.adapter
        )
        result["outputs"].append(answer["output_ids"])
        result["cached"].append(answer["meta_info"]["cached_tokens"])
    result["vattn"] = _counters(engine)
    file, vocabulary = run.get("distributions", ("", 0))
    answers = (
        []
        if not prompts
        else engine.generate(
            input_ids=prompts,
            sampling_params=[sampling(request.new_tokens) for request in requests],
            lora_path=[request.adapter for request in requests] if any(r.adapter for r in requests) else None,
            **({"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": vocabulary} if file else {}),
        )
    )
    result["together"] = [answer["output_ids"] for answer in answers]
    if file:
        _save_distributions(answers, file, vocabulary)
    engine.flush_cache()
    result["after_flush"] = _counters(engine)
    engine.shutdown()
    return result


def _save_distributions(answers: Sequence[dict[str, Any]], file: str, vocabulary: int) -> None:
    import numpy as np

    from tests.gpu.arm import distribution

    out: dict[str, Any] = {}
    for i, answer in enumerate(answers):
        out[f"tokens_{i}"] = np.array(answer["output_ids"])
        top = answer["meta_info"]["output_top_logprobs"]
        out[f"logprobs_{i}"] = np.stack([distribution(one, vocabulary) for one in top])
    np.savez(file, **out)


def _counters(engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0].get("vattn") or {}
    return found


def _fork() -> None:
    """SGLang spawns its processes, for CUDA's sake. Here there is none."""

    def popen(process: Any) -> Any:
        context: Any = multiprocessing.get_context("fork")
        return context.Process._Popen(process)

    standard: Any = multiprocessing.context
    standard.Process._Popen = staticmethod(popen)


def _in_a_fork(run: Run, out: Path) -> dict[str, Any]:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # so that what it starts can be ended with it
        code = 1
        try:
            _fork()
            if run["engine"].get("lora_paths"):
                _unpin()
            out.write_text(json.dumps(_serve(run)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + limit_s(run)
    try:
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                return {"error": f"more than {limit_s(run):.0f} s"}
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # nothing of it is left
    return _result(os.waitstatus_to_exitcode(ended[1]), out)


def _in_a_process(run: Run, out: Path) -> dict[str, Any]:
    """On a GPU: while SGLang is imported it asks the driver for the device's name, and a fork cannot use CUDA then."""
    spec = out.with_name(f"{out.name}.spec")
    spec.write_text(json.dumps(run))
    command = [sys.executable, "-m", "tests.support.engines", "--one", str(spec), str(out)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s(run))
    except subprocess.TimeoutExpired:
        return {"error": f"more than {limit_s(run):.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return _result(code, out)


def _result(code: int, out: Path) -> dict[str, Any]:
    if code:
        return {"error": f"ended with {code}"}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main() -> None:
    *one, spec, out = sys.argv[1:]
    runs = json.loads(Path(spec).read_text())
    if one:
        Path(out).write_text(json.dumps(_serve(runs)))
        return
    start = _in_a_process
    if all(run["engine"].get("device") == "cpu" for run in runs):
        import_sglang()
        start = _in_a_fork
    results = []
    for i, run in enumerate(runs):
        began = time.monotonic()
        results.append(start(run, Path(out).with_suffix(f".{i}")))
        print(f"engine {i}: {time.monotonic() - began:.1f} s {results[-1].get('error', '')}", flush=True)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
