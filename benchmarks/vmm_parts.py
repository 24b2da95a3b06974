# SPDX-License-Identifier: Apache-2.0
"""Single calls of CUDA's driver, timed on the CPU: create, map, set access and unmap."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

from benchmarks.common import Row, median, spread

COUNTS = (1, 32)  # handles a set_access or unmap call covers
HANDLES = 128


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
        ("reserved", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


PINNED, DEVICE, READ_WRITE = 1, 1, 3


class Driver:
    """libcuda, as far as it is timed here. Needs a current context."""

    def __init__(self) -> None:
        import torch

        torch.zeros(1, device="cuda:0")
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.properties = _Properties(type=PINNED, location=_Location(DEVICE, 0))
        self.access = _Access(_Location(DEVICE, 0), READ_WRITE)

    def _check(self, code: int, name: str) -> None:
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        code = self.lib.cuMemAddressReserve(
            ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        )
        self._check(code, "cuMemAddressReserve")
        return address.value

    def free(self, address: int, size: int) -> None:
        self._check(self.lib.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(size)), "cuMemAddressFree")

    def create(self, size: int) -> int:
        handle = ctypes.c_uint64()
        code = self.lib.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self.properties), ctypes.c_uint64(0)
        )
        self._check(code, "cuMemCreate")
        return handle.value

    def release(self, handle: int) -> None:
        self._check(self.lib.cuMemRelease(ctypes.c_uint64(handle)), "cuMemRelease")

    def map(self, address: int, size: int, handle: int) -> None:
        code = self.lib.cuMemMap(
            ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(handle),
            ctypes.c_uint64(0),
        )  # fmt: skip
        self._check(code, "cuMemMap")

    def set_access(self, address: int, size: int) -> None:
        code = self.lib.cuMemSetAccess(
            ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.byref(self.access), ctypes.c_size_t(1)
        )
        self._check(code, "cuMemSetAccess")

    def unmap(self, address: int, size: int) -> None:
        self._check(self.lib.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size)), "cuMemUnmap")


def parts(page_bytes: int, rounds: int) -> Iterator[Row]:
    """Microseconds a handle of each call, by handles a call."""
    driver = Driver()
    span = HANDLES * page_bytes
    for count in COUNTS:
        raw: dict[str, list[float]] = {name: [] for name in ("create", "map", "set_access", "unmap")}
        for _ in range(rounds):
            times = dict.fromkeys(raw, 0.0)
            address = driver.reserve(span)
            start = time.perf_counter()
            handles = [driver.create(page_bytes) for _ in range(HANDLES)]
            times["create"] = time.perf_counter() - start
            start = time.perf_counter()
            for number, handle in enumerate(handles):
                driver.map(address + number * page_bytes, page_bytes, handle)
            times["map"] = time.perf_counter() - start
            for call in (driver.set_access, driver.unmap):
                start = time.perf_counter()
                for first in range(0, HANDLES, count):
                    call(address + first * page_bytes, count * page_bytes)
                times[call.__name__] = time.perf_counter() - start
            for handle in handles:
                driver.release(handle)
            driver.free(address, span)
            for name, seconds in times.items():
                raw[name].append(seconds / HANDLES * 1e6)
        yield {
            "part": "parts",
            "case": f"{page_bytes >> 10} KiB, {count} handles a call",
            "page_bytes": page_bytes,
            "pages_a_row": count,
            **{f"{name}_us": median(values) for name, values in raw.items()},
            "spread": {name: spread(values) for name, values in raw.items()},
            "raw": raw,
        }
