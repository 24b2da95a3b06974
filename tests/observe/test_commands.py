# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_vattn top`, `snapshot` and `doctor`, as a user runs them."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.observe.conftest import KEY, GuardedServer
from tests.observe.support import Load, picture
from tests.support.server import Server, environment, free_port, python_path

LIMIT_S = 120
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def command(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_vattn", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(extra),
        check=False,
    )


class Terminal:
    """A command in a pseudo-terminal of a size."""

    def __init__(self, columns: int, lines: int, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell runs in the background
            # readline, which pytest imports, sets COLUMNS and LINES, and the workers of xdist inherit them.
            inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            env = {**inherited, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execve(sys.executable, [sys.executable, "-m", "sglang_vattn", *arguments], env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.raw = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character

    def read(self, seconds: float) -> str:
        """What it writes within so many seconds, as it comes."""
        end, got = time.monotonic() + seconds, ""
        while (left := end - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left)[0]:
                try:
                    got += self._decode(os.read(self._fd, 1 << 16))
                except OSError:  # it ended
                    break
        self.raw += got
        return got

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        os.write(self._fd, b"\x03")
        self.read(5)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("it did not end on Ctrl-C")


def keep_screen(path: Path, shown: str, columns: int) -> None:
    """What a terminal shows, as SVG."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=columns, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text.from_ansi(shown.replace("\r", "")), no_wrap=True, crop=True)
    drawing = console.export_svg(title="python -m sglang_vattn top")
    assert "private" in drawing and "prefix" in drawing
    path.write_text(re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL))  # it asks for a font from the network


@pytest.mark.parametrize(("columns", "lines"), [(120, 40), (80, 24)])
def test_top_in_a_terminal(large: Server, root: Path, columns: int, lines: int) -> None:
    with Load(large, clients=8, new_tokens=150).running():
        time.sleep(2)
        terminal = Terminal(columns, lines, "top", large.base, "--interval=0.5")
        deadline = time.monotonic() + LIMIT_S
        frames: list[str] = []
        while len(frames) < 6 and time.monotonic() < deadline:
            terminal.read(1)
            frames = SEQUENCE.sub("", terminal.raw).split("vattn http")[1:]
        before = terminal.raw  # the frame under way at Ctrl-C stays incomplete
        assert terminal.interrupt() == 0
    assert len(frames) >= 6, "it is live"
    last = frames[-2]
    assert re.search(r"pages \d+/7000", last)
    for word in ("private", "evictable", "hit tokens/s", "rows: ", "prefix tree: ", "tokens 0-"):
        assert word in last, last
    assert len(set(frames[:-1])) > 1, "and the numbers move"
    drawn = last.replace("\r", "").rstrip("\n").split("\n")
    assert len(drawn) <= lines, "it fits the terminal"
    assert max(map(len, drawn)) > columns - 8, "and fills it"
    assert [line for line in drawn[1:] if len(line) > columns] == []
    if columns == 120:
        keep_screen(picture(root, "top.svg"), before.split("\x1b[H")[-2], columns)
    assert "\x1b[?1049h" in terminal.raw and "\x1b[?1049l" in terminal.raw, "the user's screen comes back"


def test_top_once(guarded: GuardedServer) -> None:
    shown = command("top", guarded.base, "--once", f"--api-key={KEY}")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "/64" in shown.stdout
    by_environment = command("top", guarded.base, "--once", SGLANG_API_KEY=KEY)
    assert by_environment.returncode == 0


def test_top_says_what_is_wrong(guarded: GuardedServer) -> None:
    refused = command("top", guarded.base, "--once")
    assert refused.returncode == 1
    assert "--api-key" in refused.stdout
    nobody = command("top", f"127.0.0.1:{free_port()}", "--once")
    assert nobody.returncode == 1
    assert "does not answer" in nobody.stdout


def test_snapshot(large: Server, tmp_path: Path) -> None:
    large.together([[3] * 200 + [n] for n in range(3)], 5)
    svg, png = tmp_path / "map.svg", tmp_path / "map.png"
    assert command("snapshot", large.base, str(svg)).returncode == 0
    root = ElementTree.parse(svg).getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) >= 7002
    assert command("snapshot", large.base, str(png), "--theme=dark").returncode == 0
    from PIL import Image

    with Image.open(png) as image:
        assert image.size[0] == 2400
        assert len(image.getcolors(1 << 20) or []) > 4
    wrong = command("snapshot", large.base, str(tmp_path / "map.gif"))
    assert wrong.returncode == 1
    assert "must end in .svg or .png" in wrong.stderr


def test_snapshot_names_the_library_that_is_missing(guarded: GuardedServer, tmp_path: Path) -> None:
    (tmp_path / "PIL.py").write_text("raise ImportError('not here')")
    answer = command(
        "snapshot", guarded.base, str(tmp_path / "map.png"), f"--api-key={KEY}", PYTHONPATH=python_path(tmp_path)
    )
    assert answer.returncode == 1
    assert "pip install pillow" in answer.stderr


def test_doctor() -> None:
    well = command("doctor")
    assert well.returncode == 0, well.stdout + well.stderr
    for word in ("python", "core", "sglang", "torch", "driver", "granularity", "plugin", "hooks", "Ready"):
        assert word in well.stdout
    ill = command("doctor", SGLANG_PLUGINS="another")
    assert ill.returncode == 1
    assert "add vattn" in ill.stdout and "will not start here" in ill.stdout
