# SPDX-License-Identifier: Apache-2.0
"""Our hooks are in place beside those of another plugin that came first."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

TARGET = "sglang.srt.mem_cache.common.touch_waiting_prefix"
HookRegistry.register(TARGET, lambda *a, **kw: None, HookType.BEFORE)
HookRegistry.apply_hooks()

from sglang_vattn import plugin

plugin.register()
plugin.install()
plugin.install()
assert len(HookRegistry._hooks[TARGET]) == 2

from sglang.srt.mem_cache import common
from sglang_vattn.tree_cache import VattnTreeCache

tree = VattnTreeCache.__new__(VattnTreeCache)
tree.disable = True
common.touch_waiting_prefix(None, tree)  # SGLang's own would ask the request, and there is none: ours does not
"""


def test_beside_another_plugin_of_the_same_target() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
