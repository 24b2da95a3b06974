# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (`-p tests.sanitizers.other_core`): `sglang_vattn._core` is the file that VATTN_TEST_CORE names."""

from __future__ import annotations

import importlib.util
import os
import sys

NAME = "sglang_vattn._core"

_spec = importlib.util.spec_from_file_location(NAME, os.environ["VATTN_TEST_CORE"])
assert _spec is not None and _spec.loader is not None
sys.modules[NAME] = _core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_core)

import sglang_vattn  # noqa: E402  it finds the module above in place

sglang_vattn._core = _core  # type: ignore[attr-defined]
