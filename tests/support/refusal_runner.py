# SPDX-License-Identifier: Apache-2.0
"""Many command lines of `python -m sglang.launch_server`, at the price of one start.

Importing SGLang takes seconds and refusing a flag takes none. So one process imports it once
and forks for every command line. A fork ends with the launcher's exit code, or with STARTED
where the launcher was about to start its first child process: the scheduler, which loads the
model, comes after that. Nothing is served here.

Standard input: a JSON list of argument lists. Standard output: a JSON list of [code, text].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

STARTED = 99
CASE_LIMIT_S = 60


class Ending(NamedTuple):
    code: int
    text: str  # standard output and standard error

    @property
    def last_line(self) -> str:
        return self.text.strip().rsplit("\n", 1)[-1]


def endings(argument_lists: Sequence[Sequence[str]], env: dict[str, str]) -> list[Ending]:
    """How `launch_server` ends for each of these argument lists."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        input=json.dumps([list(arguments) for arguments in argument_lists]),
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120 + CASE_LIMIT_S * len(argument_lists),
    )
    return [Ending(*pair) for pair in json.loads(done.stdout)]


def _launch(arguments: list[str]) -> int:
    """As the end of sglang/launch_server.py, in a fork."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    sys.argv[1:] = arguments
    BaseProcess.start = lambda self: os._exit(STARTED)  # type: ignore[method-assign]
    try:
        run_server(prepare_server_args(arguments))
        return 0
    except SystemExit as end:  # as the interpreter treats it
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1


def _in_a_fork(arguments: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = _launch(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        deadline = time.monotonic() + CASE_LIMIT_S
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, 9)
            time.sleep(0.01)
        output.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), output.read().decode(errors="replace")


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed while SGLang is imported is not the result
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    argument_lists = list(enumerate(json.load(sys.stdin)))
    flagged = [each for each in argument_lists if any(word.startswith("--kv-backend") for word in each[1])]
    ended = {
        number: _in_a_fork(arguments) for number, arguments in argument_lists if (number, arguments) not in flagged
    }

    # What the flag installs, once for all forks; each installs it again, which then finds it in place.
    from sglang_vattn import plugin

    plugin.install()
    ended |= {number: _in_a_fork(arguments) for number, arguments in flagged}
    json.dump([ended[number] for number in range(len(ended))], results)
    results.close()


if __name__ == "__main__":
    main()
