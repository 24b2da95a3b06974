# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server in its own process group, stopped whatever happens.

None outlives the process that started it: a server of its own is started through coreutils' `timeout` and ends after
LIFETIME_S, a forked one (see `zygote.py`) ends with its zygote.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from tests.support.client import Client
from tests.support.zygote import Forked, Zygote

LAUNCH = ("-m", "sglang.launch_server")
START_LIMIT_S = 240
STOP_LIMIT_S = 15
LIFETIME_S = 1200

# Small, deterministic, on the CPU. `--sleep-on-idle` keeps idle servers off the cores;
# SGLang checks its pools for leaks before it goes to sleep.
BASE_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--dtype=float32",
    "--context-length=4096",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--sleep-on-idle",
    "--log-level=info",
)
# SGLang's own checks of the pool: while busy, and that no page is both free and owned.
# (The check when idle is on by default.)
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
# Read when they are needed, not when SGLang is imported.
FORKABLE = {*STRICT, "SGLANG_PLUGINS", "SGLANG_CPU_OMP_THREADS_BIND"} | {
    f"SGLANG_REQ_{limit}_TIMEOUT" for limit in ("WAITING", "RUNNING")
}
_FIRST = threading.Lock()
SCHEDULER = "sglang::scheduler"  # the title that SGLang gives the process
# No plugin is loaded, ours neither: SGLang as it comes from its wheel.
NO_PLUGINS = {"SGLANG_PLUGINS": "none"}

TROUBLE = re.compile(
    r"Traceback|leak|double free|use-after-free|half.installed|Segmentation|AssertionError"
    r"|Failed to (?:load|execute|apply)",
    re.IGNORECASE,
)


# SGLang 0.5.23 posts to its own HTTP server before that listens; nothing comes of it.
HARMLESS = "post-warmup freeze_gc failed"
RECORD = re.compile(r"^(?=\[\d{4}-\d\d-\d\d )", re.MULTILINE)  # where a log record begins


class ServerError(Exception):
    """The server did not start, died, or logged something that it must not."""


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server or of `sglang.Engine`: offline, one thread an operator.

    MALLOC_PERTURB_ fills new memory with 0xC2, so float32 that nobody wrote reads as -97.4. That
    shows up where it is used. And SGLang's CPU attention pads the queries of a hit with such
    memory; what lay there by chance are denormal numbers, which make a hit 15 times slower.
    """
    ours = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MALLOC_PERTURB_": "61"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "VATTN_"))}
    return {**inherited, **ours, **extra}


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these before what it has: SGLang itself may be found by it."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@cache
def _zygote() -> Zygote:
    return Zygote(environment(STRICT))


def zygote() -> Zygote:
    """The process that servers are forked from, one for all that this process starts, in any thread."""
    with _FIRST:
        return _zygote()


def free_port() -> int:
    """A port below those that the system gives to clients: a server takes a minute to listen, and they come and go."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(15_000, 32_000)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Server(Client):
    """`with Server(model, folder, ["--kv-backend=vattn"]) as server: server.generate(...)`

    It starts from the session's zygote, unless told not to, or started by another command, or given switches that
    SGLang reads too early for that.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] = STRICT,
        command: Sequence[str] = LAUNCH,
        forked: bool = True,
        lifetime_s: float = LIFETIME_S,
    ) -> None:
        super().__init__(free_port())
        port = self.base.rsplit(":", 1)[1]
        self.log_path = folder / "server.log"
        self._arguments = ["--model-path", str(model), "--host=127.0.0.1", f"--port={port}", *BASE_FLAGS, *flags]
        self._command = ["timeout", "--kill-after=10", str(lifetime_s), sys.executable, *command]
        early = any(name.startswith("SGLANG_") and name not in FORKABLE for name in env)
        self._forked = forked and command == LAUNCH and not early
        self._folder, self._env = folder, environment(env)
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._log: IO[bytes] | None = None
        self.start_s = 0.0

    # ---- life
    def start(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._forked:
            self._process = zygote().start(self._arguments, self._env, self._folder, self.log_path)
        else:
            self._log = self.log_path.open("wb")
            self._process = subprocess.Popen(
                [*self._command, *self._arguments],
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_until_healthy(self) -> None:
        began = time.monotonic()
        while time.monotonic() < began + START_LIMIT_S:
            self.assert_running()
            try:
                self.text("/health", limit_s=5)
                self.start_s = time.monotonic() - began
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise ServerError(f"not up within {START_LIMIT_S} s{self._tail()}")

    def stop(self) -> None:
        """Ctrl-C for SGLang's launcher, which ends its children; then the end of the whole group."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            first = psutil.Process(process.pid)
            for launcher in [first] if self._forked else first.children():  # of `timeout`: there is one
                launcher.send_signal(signal.SIGINT)
            psutil.wait_procs(family, timeout=STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_LIMIT_S)
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- what it says of itself
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _tail(self, lines: int = 60) -> str:
        return "; the end of its log:\n" + "\n".join(self.log().splitlines()[-lines:])

    def assert_running(self) -> None:
        code = 0 if self._process is None else self._process.poll()
        if code is not None:
            raise ServerError(f"the server ended with {code}{self._tail()}")

    def assert_clean(self) -> None:
        """It runs, answers, and its log has no traceback and no leak."""
        self.assert_running()
        self.text("/health", limit_s=30)
        records = RECORD.split(self.log())
        bad = [text for text in records if TROUBLE.search(text) and HARMLESS not in text]
        if bad:
            raise ServerError("the log has: " + "\n".join(bad[:3]))

    def scheduler_pid(self) -> int:
        """The process that owns the KV cache."""
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children(recursive=True):
            if SCHEDULER in " ".join(child.cmdline()):
                return int(child.pid)
        raise ServerError(f"no scheduler process{self._tail()}")
