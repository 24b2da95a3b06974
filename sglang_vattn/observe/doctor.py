# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_vattn doctor``: what this machine has, and whether vattn can run on it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from sglang_vattn import SUPPORTED_SGLANG, __version__

LEAST_MAP_COUNT = 65530  # Linux's default


class Finding(NamedTuple):
    """One line: ``no`` stops vattn, ``note`` does not."""

    verdict: Literal["ok", "note", "no"]
    what: str
    text: str


def run() -> int:
    """Print every finding and a last word; 0 if vattn can run here, 1 if not."""
    warnings.simplefilter("ignore")  # SGLang warns about every accelerator that is absent
    problems = 0
    for check in CHECKS:
        try:
            findings = list(check())
        except Exception as error:  # a check must never hide the others
            findings = [Finding("no", check.__name__, f"{type(error).__name__}: {error}")]
        for finding in findings:
            problems += finding.verdict == "no"
            print(f"{finding.verdict:>4}  {finding.what:<10} {finding.text}", flush=True)
    print(
        f"\n{problems} problem{'s' if problems > 1 else ''}: --kv-backend vattn will not start here."
        if problems
        else "\nReady: python -m sglang.launch_server --kv-backend vattn ..."
    )
    return 1 if problems else 0


def check_python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def check_core() -> Iterator[Finding]:
    try:
        from sglang_vattn import _core
    except ImportError as error:
        yield Finding("no", "core", f"the C++ extension does not load ({error}): reinstall sglang-vattn")
        return
    yield Finding("ok", "core", f"sglang-vattn {__version__}, {Path(_core.__file__).name}")


def check_sglang() -> Iterator[Finding]:
    wanted = ", ".join(SUPPORTED_SGLANG)
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("no", "sglang", f"not installed: pip install sglang=={SUPPORTED_SGLANG[-1]}")
        return
    supported = version in SUPPORTED_SGLANG
    yield Finding(
        "ok" if supported else "no", "sglang", f"{version}, {'supported' if supported else f'supported is {wanted}'}"
    )


def check_torch() -> Iterator[Finding]:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding("ok", "torch", f"{torch.__version__}, {built}")
    if not torch.cuda.is_available():
        yield Finding("note", "gpu", "none that torch can use: vattn can serve on the CPU (--device cpu)")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            "ok",
            "gpu",
            f"{index}: {torch.cuda.get_device_name(index)}, capability {major}.{minor}, "
            f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free",
        )
        if major != 9:
            yield Finding("note", "gpu", f"{index}: FA3 needs capability 9.x: this one reads by pages only")


def check_driver() -> Iterator[Finding]:
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            raise OSError("cuDriverGetVersion failed")
    except OSError as error:
        yield Finding("note", "driver", f"no CUDA driver ({error})")
        return
    kernel_module = Path("/sys/module/nvidia/version")
    module = f", kernel module {kernel_module.read_text().strip()}" if kernel_module.exists() else ""
    yield Finding("ok", "driver", f"CUDA {version.value // 1000}.{version.value % 1000 // 10}{module}")
    import torch

    for index in range(torch.cuda.device_count()):
        from sglang_vattn import _core

        try:
            driver = _core.CudaDriver(index)
            _try_space(driver, driver.granularity)
        except (_core.DriverError, ValueError) as error:
            yield Finding("no", "vmm", f"GPU {index} has no usable virtual memory management: {error}")
        else:
            yield Finding(
                "ok",
                "vmm",
                f"GPU {index} maps one page at two addresses; granularity {driver.granularity // 2**20} MiB",
            )


def check_host() -> Iterator[Finding]:
    from sglang_vattn import _core

    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    try:
        driver = _core.HostDriver()
        _try_space(driver, driver.granularity)
    except (_core.DriverError, ValueError) as error:
        yield Finding("no", "host", f"host memory cannot be mapped twice: {error}")
        return
    text = f"maps one page at two addresses; granularity {driver.granularity} bytes, vm.max_map_count {limit}"
    yield Finding("ok", "host", text)
    if limit < LEAST_MAP_COUNT:
        yield Finding("note", "host", f"a CPU server may alias only {limit // 2} pages: sysctl vm.max_map_count=262144")


def check_plugin() -> Iterator[Finding]:
    points = importlib.metadata.entry_points(group="sglang.srt.plugins", name="vattn")
    if not list(points):
        yield Finding("no", "plugin", "SGLang will not find it: reinstall sglang-vattn (its entry point is missing)")
        return
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen is not None and "vattn" not in [name.strip() for name in chosen.split(",")]:
        yield Finding("no", "plugin", f"SGLANG_PLUGINS={chosen} leaves it out: unset it, or add vattn")
        return
    yield Finding("ok", "plugin", "SGLang finds it by its entry point")


def check_hooks() -> Iterator[Finding]:
    if importlib.metadata.version("sglang") not in SUPPORTED_SGLANG:
        yield Finding("note", "hooks", "not tried, as this SGLang is not supported")
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_vattn import plugin

    plugin.register()
    try:
        plugin.install()
    except plugin.InstallError as error:
        yield Finding("no", "hooks", str(error))
        return
    from sglang_vattn.hooks import HOOKS, PAGE_HOOKS

    applied = sum(hook.target in HookRegistry._patched for hook in HOOKS)
    yield Finding("ok", "hooks", f"all {applied} into SGLang apply; {len(PAGE_HOOKS)} more with --vattn-page")


def _try_space(driver: object, granularity: int) -> None:
    """The smallest pool there is: its construction checks that two addresses are the same memory."""
    from sglang_vattn import _core

    space = _core.AddressSpace(driver, 2, granularity, 2, 2)  # type: ignore[arg-type]
    space.close()


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_core,
    check_sglang,
    check_torch,
    check_driver,
    check_host,
    check_plugin,
    check_hooks,
)
