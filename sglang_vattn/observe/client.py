# SPDX-License-Identifier: Apache-2.0
"""Asks a running server for its state. Standard library only, so it works where SGLang is not installed."""

from __future__ import annotations

import base64
import json
import sys
import urllib.error
import urllib.request
from array import array
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 10.0


class Unreachable(Exception):
    """The server does not answer, refuses, or does not run vattn; the text says what to do."""


@dataclass
class Row:
    """A running request. ``pages``: ``shared`` of its prefix, its own, then ``ahead`` that are only reserved."""

    row: int
    tokens: int
    shared: int
    ahead: int
    mapped: int
    ready: bool
    pages: list[int]


@dataclass
class View:
    """What the server has told. Without ``--vattn-page`` only the facts are there."""

    facts: dict[str, int]
    states: bytes = b""  # per page, index into page_states.STATES
    nodes: list[int] = field(default_factory=list)
    sharers: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    tree: list[dict[str, Any]] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)

    @property
    def detailed(self) -> bool:
        return bool(self.states)


def fetch(url: str, api_key: str | None = None, rank: int = 0) -> View:
    """The server's state, of one data-parallel rank.

    Raises
    ------
    Unreachable
    """
    base = url.rstrip("/")
    if "://" not in base:
        base = "http://" + base
    try:
        return decode(_get(base + "/vattn/state", api_key)["ranks"][rank])
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise Unreachable(_reason(base, error)) from None
    except (OSError, ValueError, LookupError) as error:
        raise Unreachable(_reason(base, error)) from None
    try:  # no --vattn-page
        states = _get(base + "/server_info", api_key)["internal_states"]
        facts: dict[str, int] = states[rank]["vattn"]
    except (LookupError, TypeError):
        raise Unreachable(f"{base} does not run --kv-backend vattn") from None
    except (OSError, ValueError) as error:
        raise Unreachable(_reason(base, error)) from None
    return View(facts)


def decode(state: dict[str, Any]) -> View:
    """One rank's part of ``/vattn/state`` (see :mod:`sglang_vattn.observe.state`)."""
    prefixes = [_unpack(text, "I") for text in state["prefixes"]]
    return View(
        facts=state["facts"],
        states=base64.b64decode(state["states"]),
        nodes=_unpack(state["nodes"], "I"),
        sharers=_unpack(state["sharers"], "H"),
        rows=[
            Row(
                row=row["row"],
                tokens=row["tokens"],
                shared=row["shared"],
                ahead=row["ahead"],
                mapped=row["mapped"],
                ready=bool(row["ready"]),
                pages=prefixes[row["prefix"]] + _unpack(row["pages"], "I"),
            )
            for row in state["rows"]
        ],
        tree=state["tree"],
        history=state["history"],
    )


def rate(history: dict[str, list[float]], name: str, over_s: float = 10.0) -> float:
    """How fast a counting fact grew over the last seconds of the history, a second."""
    times, values = history.get("time_s", []), history.get(name, [])
    if len(times) < 2:
        return 0.0
    first = next(i for i, time_s in enumerate(times) if time_s >= times[-1] - over_s)
    first = min(first, len(times) - 2)
    return (values[-1] - values[first]) / max(1e-3, times[-1] - times[first])


def _get(url: str, api_key: str | None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def _unpack(text: str, code: str) -> list[int]:
    values = array(code, base64.b64decode(text))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _reason(base: str, error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
        return f"{base} refuses: give its key with --api-key or the environment variable SGLANG_API_KEY"
    if isinstance(error, urllib.error.HTTPError):
        return f"{base} answers {error.code} {error.reason}"
    return f"{base} does not answer: {getattr(error, 'reason', error)}"
