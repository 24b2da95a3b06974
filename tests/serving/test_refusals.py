# SPDX-License-Identifier: Apache-2.0
"""What cannot be honoured is refused: before the model loads, in one line that names the flag."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.refusal_runner import STARTED, Ending, endings
from tests.support.server import BASE_FLAGS, STRICT, Server, ServerError, environment, python_path

VATTN = "--kv-backend=vattn"
REFUSED = [
    "--page-size 1",
    "--page-size 3",
    "--page-size 127",
    "--attention-backend triton",
    "--radix-cache-backend unified",
    "--radix-eviction-policy tlru",
    "--kv-cache-dtype mxfp8",
    "--kv-cache-dtype nvfp4",
    "--speculative-algorithm NGRAM",
    "--disaggregation-mode prefill",
    "--disaggregation-mode decode",
    "--disaggregation-decode-enable-offload-kvcache",
    "--disaggregation-decode-enable-radix-cache",
    "--enable-pd-role-switch",
    "--enable-hierarchical-cache",
    "--enable-unified-cache-external-linker",
    "--enable-lmcache",
    "--enable-flexkv",
    "--enable-hisparse",
    "--enable-unified-memory",
    "--enable-page-major-kv-layout",
    "--enable-kv-cache-sharding",
    "--enable-prefill-cp",
    "--enable-mixed-chunk",
    "--enable-memory-saver",
    "--enable-pdmux",
    "--enable-two-batch-overlap",
    "--enable-streaming-session",
    "--enable-session-radix-cache",
    "--enable-dynamic-chunking",
    "--enable-nvidia-megakernel",
    "--prefill-only-disable-kv-cache",
    "--strip-thinking-cache",
    "--kv-canary log",
    "--kv-events-config {}",
    "--dllm-algorithm LowConfidence",
    "--elastic-ep-backend mooncake",
    "--enable-dp-attention --tp-size 2 --dp-size 2",
    "--use-ray",
    "--pp-size 2",
    "--dcp-size 2",
    "--attn-cp-size 2",
    "--vattn-rows 1",
    "--vattn-kernel fa3",
    "--vattn-kernel fa2",
    "--vattn-kernel fa4",
    "--vattn-kernel flashinfer",
    "--vattn-kernel torch",
]
ACCEPTED = [
    "--page-size 2",
    "--page-size 16",
    "--page-size 126",
    "--radix-eviction-policy lfu",
    "--radix-eviction-policy slru",
    "--disable-radix-cache",
    "--tp-size 2",
    "--dp-size 2",
    "--kv-cache-dtype fp8_e4m3",
    "--vattn-read rows",
    "--vattn-read pages",
    "--vattn-kernel sdpa",
]
#: Of the refused, some that stock SGLang accepts on this machine.
OURS_ALONE = ["--page-size 1", "--enable-mixed-chunk", "--enable-session-radix-cache", "--strip-thinking-cache"]


@pytest.fixture(scope="module")
def ends(llama: Path) -> dict[str, Ending]:
    """How the launcher ends for each of the flags above, with our flag and without."""
    lines = [f"{VATTN} {flags}" for flags in (*REFUSED, *ACCEPTED)] + [*OURS_ALONE, "--help"]
    common = ["--model-path", str(llama), *BASE_FLAGS, "--max-total-tokens=4096"]
    results = endings([[*common, *line.split()] for line in lines], environment({}))
    return dict(zip(lines, results, strict=True))


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_in_one_line_that_names_the_flag(ends: dict[str, Ending], flags: str) -> None:
    end = ends[f"{VATTN} {flags}"]
    assert end.code not in (0, STARTED), end.text
    assert flags.split()[0] in end.last_line
    assert "Traceback" not in end.text


@pytest.mark.parametrize("flags", ACCEPTED)
def test_accepted(ends: dict[str, Ending], flags: str) -> None:
    """The test above can tell: these start."""
    assert ends[f"{VATTN} {flags}"].code == STARTED, ends[f"{VATTN} {flags}"].text


@pytest.mark.parametrize("flags", OURS_ALONE)
def test_refused_for_our_flag_only(ends: dict[str, Ending], flags: str) -> None:
    assert ends[flags].code == STARTED, ends[flags].text


def test_wrong_page_size_names_the_allowed_ones(ends: dict[str, Ending]) -> None:
    assert "multiple of 2" in ends[f"{VATTN} --page-size 3"].last_line


def test_the_real_launcher(llama: Path) -> None:
    """The same through the real command, whose exit code is that of a failure."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(llama), *BASE_FLAGS]
    done = subprocess.run(
        [*command, VATTN, "--enable-mixed-chunk"],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    assert "--enable-mixed-chunk" in done.stderr.strip().rsplit("\n", 1)[-1]
    assert "Traceback" not in done.stderr


def test_a_half_installed_scheduler_refuses(llama: Path, root: Path, tmp_path: Path) -> None:
    """SGLang only logs a hook that fails to apply; our check in the child ends the start."""
    env = {"PYTHONPATH": python_path(root / "tests" / "support" / "probe"), "SGLANG_PLUGINS": "saboteur,vattn"}
    server = Server(llama, tmp_path, [VATTN, "--max-total-tokens=4096"], env=STRICT | env, forked=False)
    with pytest.raises(ServerError, match=r"the server ended with -?[1-9]"):
        server.start()
    assert "the saboteur was here" in server.log()
    assert "these hooks into SGLang did not apply" in server.log()
    assert "forward_batch_generation" in server.log()
    assert "ready to roll" not in server.log()


def test_the_flag_is_in_the_help(ends: dict[str, Ending]) -> None:
    assert ends["--help"].code == 0
    assert "--kv-backend {default,vattn}" in ends["--help"].text
