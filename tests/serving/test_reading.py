# SPDX-License-Identifier: Apache-2.0
"""By rows, by pages or in groups, with mappings that are late: outputs are stock's, and nobody waits unasked."""

from __future__ import annotations

from pathlib import Path

from tests.support.checks import assert_same_outputs, unharmed
from tests.support.golden import Golden
from tests.support.server import STRICT, Server

FLAGS = ["--kv-backend=vattn", "--page-size=16", "--chunked-prefill-size=64", "--max-total-tokens=8192"]
LATE = {"VATTN_TEST_MAP_DELAY_S": "0.05"}  # every map call takes so much longer
SHARE_ALWAYS = {"VATTN_SHARED_DECODE_BYTES": "1"}
AT_ONCE = 16


def serve(model: Path, folder: Path, golden: Golden, flags: list[str], env: dict[str, str]) -> dict[str, int]:
    """Serve the stress workload, check every output, and return what the counters rose by."""
    cases = golden["stress"]
    with Server(model, folder, [*FLAGS, *flags], env=STRICT | env) as server, unharmed(server):
        before = server.vattn()
        answers = server.many([(case.prompt, case.new_tokens) for case in cases], AT_ONCE)
        assert_same_outputs(cases, answers)
        after = server.vattn()
    return {key: after[key] - before[key] for key in after}


def test_auto_never_waits_for_a_late_mapping(llama: Path, golden: Golden, tmp_path: Path) -> None:
    rose = serve(llama, tmp_path, golden, ["--vattn-shared-decode=off"], LATE)
    assert rose["batches_waited"] == rose["waits"] == 0
    assert rose["batches_pages"] > 0 and rose["pages_mapped"] > 0


def test_rows_waits_for_a_late_mapping(llama: Path, golden: Golden, tmp_path: Path) -> None:
    rose = serve(llama, tmp_path, golden, ["--vattn-read=rows", "--vattn-shared-decode=off"], LATE)
    assert rose["batches_waited"] > 0 and rose["waits"] > 0
    assert rose["batches_rows"] > 0 and rose["batches_pages"] == 0


def test_a_prefix_is_read_once_for_all_who_share_it(llama: Path, golden: Golden, tmp_path: Path) -> None:
    """Groups form and dissolve as requests come and go; told so, we read in two levels however little that saves."""
    rose = serve(llama, tmp_path, golden, [], SHARE_ALWAYS)
    assert rose["batches_shared"] > 20 and rose["members"] >= 2 * rose["groups"] > 0
    assert rose["pages_saved"] > 0 and rose["batches_waited"] == 0
