# SPDX-License-Identifier: Apache-2.0
"""The page ``/vattn`` and its data ``/vattn/state``, served by SGLang's own HTTP server.

Both are ordinary routes, so SGLang's API key guards them where one is set. A browser cannot send that key when it
opens an address; so the refusal of ``/vattn`` carries a form that asks for it and loads the page with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_vattn import SUPPORTED_SGLANG, __version__
from sglang_vattn.observe import STATE_RID

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/vattn"
STATE_PATH = "/vattn/state"
FRESH_S = 0.5  # any number of viewers costs the scheduler two answers a second
_ASSETS = Path(__file__).parent / "assets"
# Nothing from elsewhere, nothing that runs but what is in the page.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def install(server_args: Any) -> None:
    """Install the hook that adds the routes. Called in every process when ``--vattn-page`` is given; idempotent.

    Raises
    ------
    InstallError
        If it did not apply.
    Refused
        With several HTTP processes: SGLang has no API key check there, and they load no plugin in time.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_vattn.hooks import PAGE_HOOKS
    from sglang_vattn.plugin import InstallError
    from sglang_vattn.refusals import Refused

    if (server_args.tokenizer_worker_num or 1) > 1:
        raise Refused("--vattn-page does not support --tokenizer-worker-num above 1: leave one of them out")
    for hook in PAGE_HOOKS:
        if hook.target not in HookRegistry._patched and hook.target not in HookRegistry._hooks:
            HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in PAGE_HOOKS if hook.target not in HookRegistry._patched]
    if missing:
        raise InstallError(
            f"--vattn-page: these hooks into SGLang did not apply: {', '.join(missing)}; "
            f"use SGLang {', '.join(SUPPORTED_SGLANG)}, or leave the flag out"
        )


def add_routes(*a: Any, **kw: Any) -> None:
    """Before ``http_server._setup_and_run_http_server``, which adds SGLang's API key check to its app."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.runtime_context import get_serving

    app = http_server.app
    logging.getLogger("uvicorn.access").addFilter(_without_polls)
    app.add_api_route(PATH, page, methods=["GET"], include_in_schema=False)
    app.add_api_route(STATE_PATH, StateSource(ask_schedulers), methods=["GET"], include_in_schema=False)
    if get_serving().api_key:
        # What is added first lies inside: SGLang's check is added later, so wrap the app when it is built.
        build = app.build_middleware_stack
        app.build_middleware_stack = lambda: KeyForm(build())


def _without_polls(record: logging.LogRecord) -> bool:
    """Viewers ask every second: no line in the log for each answer."""
    args = record.args
    return not (isinstance(args, tuple) and len(args) == 5 and args[2] == STATE_PATH and args[4] == 200)


async def page() -> Any:
    """The page itself: one file, the same for everyone."""
    from fastapi.responses import HTMLResponse

    return HTMLResponse(page_html(), headers=_HEADERS)


@cache
def page_html() -> str:
    """The page with its script and style in it."""
    return _assemble("page.html", "page.css", "map.js", "graphs.js", "page.js")


def _assemble(html: str, css: str, *scripts: str) -> str:
    text = (_ASSETS / html).read_text()
    text = text.replace("/*CSS*/", (_ASSETS / css).read_text())
    return text.replace("/*JS*/", "\n".join((_ASSETS / script).read_text() for script in scripts))


async def ask_schedulers() -> list[dict[str, Any]]:
    """The whole state of every data-parallel rank, by SGLang's internal-state call."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = http_server.get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=STATE_RID))
    return [answer.internal_state["vattn"] for answer in answers]


class StateSource:
    """The route ``/vattn/state``: asks at most once every ``FRESH_S``, however many ask for it."""

    def __init__(self, ask: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._body = b""
        self._asked_s = -FRESH_S

    async def __call__(self) -> Any:
        import orjson
        from fastapi.responses import Response

        async with self._lock:
            if time.monotonic() - self._asked_s >= FRESH_S:
                ranks = await self._ask()
                self._body = orjson.dumps({"version": __version__, "time": time.time(), "ranks": ranks})
                self._asked_s = time.monotonic()
        return Response(self._body, media_type="application/json", headers=_HEADERS)


class KeyForm:
    """Around the whole app: turns the refusal of ``/vattn`` to a browser into the form that asks for the key.

    The status stays 401, and nothing of the server is in the form.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_by_browser = (
            scope["type"] == "http"
            and scope["path"] == PATH
            and any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
        )
        if not asked_by_browser:
            await self.app(scope, receive, send)
            return
        refused = False

        async def send_form(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 401:
                refused = True
                return
            if not refused:
                await send(message)

        await self.app(scope, receive, send_form)
        if refused:
            from fastapi.responses import HTMLResponse

            form = _assemble("key.html", "page.css", "key.js")
            await HTMLResponse(form, status_code=401, headers=_HEADERS)(scope, receive, send)
