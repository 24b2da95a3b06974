# SPDX-License-Identifier: Apache-2.0
"""The entry point, and the installation of the hooks.

SGLang calls :func:`register` in every process and only logs what it raises. So it does the least possible: it
makes the flag known. All other hooks are installed by :func:`install`, which ``VattnServerArgs.resolve_once``
calls in every process when the flag is given, and which raises. Without the flag no hook exists.
"""

from __future__ import annotations

import sys
from typing import Any


class InstallError(RuntimeError):
    """A hook into SGLang is not in place: the server must not start."""


def register() -> None:
    """Entry point ``sglang.srt.plugins``: put our ``ServerArgs`` in the place of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_vattn import args

    HookRegistry.register("sglang.srt.server_args.ServerArgs", args.VattnServerArgs, HookType.REPLACE)
    # A class attribute, which the registry does not reach: sglang.Engine(kv_backend="vattn") reads it.
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    for cls in _with_subclasses(engine.Engine) if engine else ():
        if cls.__dict__.get("server_args_class") is args.stock_server_args():
            cls.server_args_class = args.VattnServerArgs


def install() -> None:
    """Install every hook of :mod:`sglang_vattn.hooks` and check that each is in place. Idempotent.

    Raises
    ------
    InstallError
        For an SGLang that is not supported, or naming the hooks that did not apply.
    """
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_vattn import SUPPORTED_SGLANG, __version__

    if sglang.__version__ not in SUPPORTED_SGLANG:
        raise InstallError(
            f"--kv-backend vattn: sglang-vattn {__version__} supports SGLang {', '.join(SUPPORTED_SGLANG)}, "
            f"this is {sglang.__version__}: install a supported one, or use --kv-backend default"
        )
    from sglang_vattn import hooks

    for hook in hooks.HOOKS:
        if any(function is hook.function for _, function, _ in HookRegistry._hooks.get(hook.target, ())):
            continue
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
        if hook.target in HookRegistry._patched:  # by another plugin, which was applied before: ours goes around it
            HookRegistry._apply_target(hook.target, HookRegistry._hooks[hook.target][-1:])
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in hooks.HOOKS if hook.target not in HookRegistry._patched]
    missing += hooks.register_factories()
    if missing:
        raise InstallError(
            "--kv-backend vattn: these hooks into SGLang did not apply: "
            + ", ".join(missing)
            + "; reinstall sglang-vattn and SGLang, or use --kv-backend default"
        )


def _with_subclasses(cls: type) -> list[Any]:
    subclasses: list[type] = cls.__subclasses__()
    return [cls] + [below for sub in subclasses for below in _with_subclasses(sub)]
