# SPDX-License-Identifier: Apache-2.0
"""Drivers that are slow or fail, for tests of whole servers. Nothing here runs unless the environment asks for it.

``VATTN_TEST_MAP_DELAY_S``
    Every map call takes so much longer.
``VATTN_TEST_FAIL_AT_START``
    The first driver call of this name fails.
``VATTN_TEST_FAULTS``
    Once the space is built: each of map, set_access and unmap fails at its k-th next call, for k = 1 up to this number.
"""

from __future__ import annotations

import itertools
import os
import threading
import time

from sglang_vattn import _core

CALLS = ("map", "set_access", "unmap")
POLL_S = 0.002


def rigged(driver: _core.Driver) -> _core.Driver:
    """The driver, or one over it that does what the environment asks for."""
    delay_s, first = float(os.environ.get("VATTN_TEST_MAP_DELAY_S", 0)), os.environ.get("VATTN_TEST_FAIL_AT_START", "")
    if not (delay_s or first or "VATTN_TEST_FAULTS" in os.environ):
        return driver
    faulty = _core.FaultyDriver(driver)
    if delay_s:
        faulty.set_delay("map", delay_s)
    if first:
        faulty.fail_at(first, 1)
    return faulty


def begin(driver: _core.Driver) -> None:
    """The space is built: let the calls of ``VATTN_TEST_FAULTS`` fail, one after the other, from now on."""
    up_to = int(os.environ.get("VATTN_TEST_FAULTS", 0))
    if up_to and isinstance(driver, _core.FaultyDriver):
        threading.Thread(target=_fail_at_every_k, args=(driver, up_to), daemon=True).start()


def _fail_at_every_k(driver: _core.FaultyDriver, up_to: int) -> None:
    for k, call in itertools.product(range(1, up_to + 1), CALLS):
        driver.fail_at(call, k)
        while driver.armed:
            time.sleep(POLL_S)
