# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``ServerArgs`` with the fields of this plugin.

Import-light on purpose: every child process imports this module while it unpickles the record, before
SGLang loads plugins there.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt import server_args as _server_args
from sglang.srt.arg_groups.arg_utils import A, Arg

NAMESPACE = "vattn"  # of the config bag: get_context().config_bag(NAMESPACE).kv_backend

# Held in a tuple, since HookRegistry rewrites every module global that *is* the class it replaces: a plain
# global would end up as our own subclass, and `resolve_once` below would call itself.
_STOCK = (_server_args.ServerArgs,)

# SGLang checks these where they come from the command line, `refusals.py` wherever they come from.
CHOICES = {
    "kv_backend": ["default", "vattn"],
    "vattn_read": ["auto", "rows", "pages"],
    "vattn_shared_decode": ["auto", "off"],
    "vattn_scrub": ["on", "off"],
}
_FIELDS: dict[str, tuple[Any, Any]] = {
    "kv_backend": (
        A[
            str,
            Arg(
                help="KV cache backend. 'vattn': per-request buffers that are contiguous in virtual memory, "
                "with prefixes shared by mapping their pages (sglang-vattn).",
                choices=CHOICES["kv_backend"],
            ),
        ],
        "default",
    ),
    "vattn_read": (
        A[
            str,
            Arg(
                help="How attention reads the vattn KV cache. 'auto': contiguous rows where they are mapped, "
                "pages otherwise; 'rows': wait until they are mapped; 'pages': never rows.",
                choices=CHOICES["vattn_read"],
            ),
        ],
        "auto",
    ),
    "vattn_kernel": (
        A[
            str,
            Arg(
                help="The attention kernel that reads vattn rows: auto (the attention backend's own), fa3, fa2, fa4, "
                "flashinfer, sdpa, torch, or module:Class. What is not in rows is still the attention backend's.",
            ),
        ],
        "auto",
    ),
    "vattn_shared_decode": (
        A[
            str,
            Arg(
                help="Whether requests of a decode batch that share a long prefix read it once. 'auto': where it pays.",
                choices=CHOICES["vattn_shared_decode"],
            ),
        ],
        "auto",
    ),
    "vattn_rows": (
        A[
            int | None,
            Arg(help="Number of vattn rows (virtual ranges), at least 2. Default: 4 for each request that can run."),
        ],
        None,
    ),
    "vattn_scrub": (
        A[
            str,
            Arg(
                help="Zero a page of the vattn KV cache when it passes from one tenant (extra key, LoRA id, cache "
                "salt) to another, before the new one's forward.",
                choices=CHOICES["vattn_scrub"],
            ),
        ],
        "on",
    ),
    "vattn_page": (
        A[
            bool,
            Arg(
                help="Serve a live map of the vattn KV cache at /vattn, behind --api-key where that is set. It shows "
                "counts and page numbers, nothing of any request's text."
            ),
        ],
        False,
    ),
}


def enabled(server_args: Any) -> bool:
    """Whether ``--kv-backend vattn`` was asked for."""
    return bool(getattr(server_args, "kv_backend", "default") == "vattn")


def _resolve_once(self: Any) -> None:
    # SGLang calls this at launch, and again in every child (publish -> _configure_context). So it is the one
    # place that every process passes before it builds anything: the hooks go in here, only when asked for,
    # and an exception here stops the start (one from the plugin's entry point would only be logged).
    if self.kv_backend == "default":
        _STOCK[0].resolve_once(self)
        return
    from sglang_vattn import plugin, refusals
    from sglang_vattn.observe import page

    try:
        refusals.check_choices(self)
        plugin.install()
        refusals.check_input(self)
        if self.vattn_page:
            page.install(self)
        _STOCK[0].resolve_once(self)
    except refusals.Refused as error:
        refusals.stop(self, error)


VattnServerArgs = msgspec.defstruct(
    "VattnServerArgs",
    [(name, annotation, default) for name, (annotation, default) in _FIELDS.items()],
    bases=_STOCK,
    module=__name__,
    namespace={
        "_NS_BY_FIELD": {**_STOCK[0]._NS_BY_FIELD, **dict.fromkeys(_FIELDS, NAMESPACE)},
        "resolve_once": _resolve_once,
    },
    dict=True,  # as stock: bookkeeping of the resolution lives beside the fields
)


def stock_server_args() -> type:
    """The class that ``VattnServerArgs`` replaces."""
    return _STOCK[0]
