# SPDX-License-Identifier: Apache-2.0
"""Without the flag, a server with the plugin installed is a stock server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checks import assert_same_hits, assert_same_outputs
from tests.support.golden import Golden
from tests.support.server import RECORD, STRICT, Server, python_path

#: Not compared: what SGLang logs about any plugin; the arguments (which have the flag's entry);
#: and its own request to /freeze_gc at the start, which sometimes comes too early to be answered.
NOT_COMPARED = re.compile(r"plugin|vattn_probe|server_args=|hook\(s\) to|freeze_gc", re.IGNORECASE)
#: Numbers, addresses, measured times and memory (its use is a difference, so it may be negative) vary from run to run.
VARYING = re.compile(r"0x[0-9a-f]+|((?<==)-)?\d+(\.\d+)?(e-?\d+)?")


def start(llama: Path, root: Path, folder: Path, plugins: str) -> Server:
    env = {"PYTHONPATH": python_path(root / "tests" / "support" / "probe"), "SGLANG_PLUGINS": plugins}
    flags = ["--page-size=1", "--max-total-tokens=16384", "--chunked-prefill-size=8192", "--enable-metrics"]
    return Server(llama, folder, flags, env=STRICT | env, forked=False)


@pytest.fixture(scope="module")
def pair(llama: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """(with our plugin loaded but no flag, without our plugin)"""
    ours = start(llama, root, tmp_path_factory.mktemp("unflagged"), "probe,vattn")
    stock = start(llama, root, tmp_path_factory.mktemp("without"), "probe")
    with ours, stock:
        yield ours, stock


def records(server: Server) -> set[str]:
    """The kinds of log records and warnings: what varies is cut out, and so is what only plugins cause.

    By lines, since the processes of a server write to one log: one's warning may stand in the middle of another's
    record.
    """
    lines = (line for line in server.log().splitlines() if RECORD.match(line) or "Warning: " in line)
    return {VARYING.sub("#", line).strip() for line in lines if not NOT_COMPARED.search(line)}


def metric_names(server: Server) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+ \S+)", server.text("/metrics"), re.MULTILINE))


def test_same_answers_logs_metrics_and_classes(pair: tuple[Server, Server], golden: Golden) -> None:
    ours, stock = pair
    for server in pair:
        cases = golden["corners-16"][:48]  # a whole document
        server.flush()
        answers = server.many([(case.prompt, case.new_tokens) for case in cases], at_once=1)
        assert_same_outputs(cases, answers)
        assert_same_hits(cases, answers)

    ours_info, stock_info = ours.info(), stock.info()
    classes = ours_info["internal_states"][0]["classes"]
    assert classes == stock_info["internal_states"][0]["classes"]
    assert classes["tree"].startswith("sglang.")
    added = set(ours_info) - set(stock_info)
    assert "kv_backend" in added, "our plugin is loaded in one, not in the other"
    assert all(field == "kv_backend" or field.startswith("vattn_") for field in added)
    assert not set(stock_info) - set(ours_info)
    assert "vattn" not in ours_info["internal_states"][0]
    assert ours_info["kv_backend"] == "default"

    assert metric_names(ours) == metric_names(stock) != set()
    assert records(ours) == records(stock)
    for server in pair:
        server.assert_clean()
