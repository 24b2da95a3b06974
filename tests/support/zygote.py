# SPDX-License-Identifier: Apache-2.0
"""Starts servers from a process that has imported SGLang already.

A start costs three imports of SGLang (launcher, scheduler, detokenizer), 30 s of processor time, and little else. So
one process a session imports it once and forks for every server; the fork runs what `python -m sglang.launch_server`
runs, and forks again where SGLang spawns. Nothing of ours and no plugin is imported before the fork, so each server
loads its plugins by itself, in the environment that it is given. Switches that SGLang reads while it is imported come
too late here: such a server starts by itself (see `server.py`), and so do those of the tests that are about starting.

Run as a program it is the zygote: one JSON request a line on standard input, one answer a line on standard output.
When standard input ends it kills every server that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Forked:
    """A server's first process; as much of `subprocess.Popen` as `Server` uses."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._zygote.ask(poll=self.pid)
        return self._code

    def wait(self, limit_s: float) -> int:
        deadline = time.monotonic() + limit_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {limit_s} s")
            time.sleep(0.02)
        return code


class Zygote:
    """The test's side."""

    def __init__(self, env: Mapping[str, str]) -> None:
        program = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            program, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._one_at_a_time = threading.Lock()

    def ask(self, **request: Any) -> Any:
        """The answer to a request; any thread may ask."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._one_at_a_time:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(self, arguments: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> Forked:
        request = {"arguments": list(arguments), "env": dict(env), "folder": str(folder), "log": str(log)}
        return Forked(self, self.ask(start=request))


def import_sglang() -> None:
    """All that a server imports, ready to be forked."""
    import setproctitle
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    assert "sglang_vattn" not in sys.modules
    setproctitle.getproctitle()  # it finds the place of the title by the first environment, which forks replace
    gc.collect()
    gc.freeze()  # SGLang collects at each start: a fork need not look through (and so copy) what was here before it


def _become_a_server(request: dict[str, Any]) -> None:
    """As the end of sglang/launch_server.py, in a fork."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with the zygote; SGLang's other processes do the same
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    random.seed()  # or two servers that start at once choose the same ports
    with open(request["log"], "wb") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = ["-m", *request["arguments"]]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *a, **kw: None

    from sglang.launch_server import kill_process_tree, run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    try:
        run_server(prepare_server_args(request["arguments"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _become_a_server(request)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _serve(requests: IO[str], answers: IO[str]) -> None:
    codes: dict[int, int | None] = {}
    for line in requests:
        match json.loads(line):
            case {"start": request}:
                pid = _fork(request)
                codes[pid] = None
                answer: int | None = pid
            case {"poll": int(pid)}:
                if codes[pid] is None:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
                answer = codes[pid]
            case other:
                raise ValueError(other)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid, code in codes.items():
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.set_inheritable(channel.fileno(), False)
    os.dup2(2, 1)  # whatever is printed while SGLang is imported is no answer
    warnings.simplefilter("ignore")
    import_sglang()
    _serve(sys.stdin, channel)
