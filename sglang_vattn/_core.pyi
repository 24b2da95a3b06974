# SPDX-License-Identifier: Apache-2.0
"""Pages, addresses and mappings: the C++ core (csrc/).

Counts are pages or rows unless a name says bytes. Bad arguments raise ValueError
and change nothing; a CUDA or system call that fails raises DriverError.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from typing_extensions import Buffer

class DriverError(RuntimeError):
    """A call of the driver failed. The text names call, code and meaning, as in
    ``cuMemMap: CUDA_ERROR_OUT_OF_MEMORY (2) out of memory`` or
    ``mmap: ENOMEM (12) Cannot allocate memory``."""

class Array(Protocol):
    """numpy's arrays, which are no Buffer to a type checker before Python 3.12."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

def common_prefix(a: Buffer | Array, b: Buffer | Array, a_start: int = 0, b_start: int = 0) -> int:
    """Length of the common prefix of ``a[a_start:]`` and ``b[b_start:]``.

    Both are contiguous buffers of int64 (``array('q')``, numpy, memoryview);
    anything else raises TypeError. A start beyond the end gives 0.
    """

class Driver:
    """What maps pages: CUDA's or the operating system's virtual memory."""

    @property
    def name(self) -> str:
        """ "host" or "cuda"."""
    @property
    def granularity(self) -> int:
        """Bytes; a page is a multiple of it."""
    @property
    def stripes(self) -> int:
        """Allocations a page: 1, but for StripedDriver."""
    @property
    def device(self) -> int:
        """CUDA ordinal; -1 on the host."""

class HostDriver(Driver):
    """Pages in host memory (one memfd), aliased by mmap.

    ``granule_bytes`` is a power of two, a multiple of the system's page; 2 MiB
    gives CUDA's geometry.
    """

    def __init__(self, granule_bytes: int = 4096) -> None: ...

class CudaDriver(Driver):
    """Pages in GPU memory, aliased by cuMemMap. DriverError says what is missing."""

    def __init__(self, device: int = 0) -> None: ...

class StripedDriver(Driver):
    """Pages as ``stripes`` allocations of ``inner`` each, at equal distances of addresses.

    A space on it counts bytes of one stripe: ``page_bytes`` and the two addresses. home()
    and rows() show all stripes, one behind the other.
    """

    def __init__(self, inner: Driver, stripes: int) -> None: ...

class FaultyDriver(Driver):
    """For tests: passes calls on to ``inner``, counts, delays and fails them.

    Calls: reserve, free, create, map, set_access, unmap, zero, write, read,
    inspect; "" stands for any of them.
    """

    def __init__(self, inner: Driver) -> None: ...
    def fail_at(self, call: str, k: int) -> None:
        """The k-th next such call (1: the very next) fails, once; 0: none does."""
    def set_delay(self, call: str, seconds: float) -> None: ...
    @property
    def armed(self) -> bool:
        """A fault is still to come."""
    def calls(self) -> dict[str, int]:
        """Calls made so far, by name."""

class Pages:
    """Who holds each physical page: counts, states and the free list.

    A page is *private* if it is owned; else *free* without tree references; else
    *protected* if any of them is locked; else *evictable*. Usable pages are
    1..num_pages; page 0, the padding page, is never handed out.

    Batch calls change all of their pages or none: a page out of range, or a count
    that would become impossible, raises ValueError. A page may occur several
    times in one ref/unref. O(1) a page. One thread changes the state; the counters
    may be read from any and always sum to ``num_pages``.
    """

    def __init__(self, num_pages: int) -> None: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def private(self) -> int: ...
    @property
    def evictable(self) -> int: ...
    @property
    def protected(self) -> int: ...
    @property
    def reserved(self) -> int:
        """Free pages that are softly reserved."""
    @property
    def reservations_lost(self) -> int:
        """How often a reserved page went to someone else; when it has changed, ask is_reserved()."""
    def take(self, n: int) -> list[int] | None:
        """n pages, free -> private; None, and no change, if fewer are free.

        Plain free pages first (the last freed first), then reserved ones (the
        oldest reservation first).
        """
    def release(self, pages: Sequence[int]) -> None:
        """The owner lets go of them."""
    def ref(self, pages: Sequence[int], locked: bool) -> None:
        """A tree node (locked or not) now refers to them."""
    def unref(self, pages: Sequence[int], locked: bool) -> None: ...
    def lock(self, pages: Sequence[int]) -> None:
        """A node that refers to them became locked."""
    def unlock(self, pages: Sequence[int]) -> None: ...
    def reserve(self, row: int) -> int:
        """Softly reserves a plain free page for a row; 0 if there is none.

        The page stays free in the counters and is the last that others are given.
        """
    def is_reserved(self, page: int, row: int) -> bool: ...
    def take_reserved(self, page: int, row: int) -> bool:
        """Takes it, if it is still free and reserved for this row."""
    def unreserve(self, page: int, row: int) -> None:
        """No-op if it is not reserved for this row any more."""
    def state(self, page: int) -> Literal["free", "private", "evictable", "protected"]: ...
    def refs(self, page: int) -> tuple[bool, int, int]:
        """(owned, tree references, those of them that are locked)."""
    def states(self) -> bytes:
        """Of every page, by number, the padding page first: 0 free, 1 private, 2 evictable, 3 protected."""

    def free_list(self) -> list[int]:
        """In the order in which take() hands them out."""
    def reset(self) -> None:
        """Everything free, no reservations."""
    def check_integrity(self) -> list[str]:
        """What is wrong; empty if the state is sound."""

class DLPackView(Protocol):
    """What torch.from_dlpack() and numpy.from_dlpack() take."""

    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class AddressSpace:
    """The pages of a pool, the home arena and the rows; and the mapping thread.

    Page 0 is the padding page, 1..num_pages are usable, num_pages + 1 is the guard
    page (zero, never written). Each is mapped once in the home arena, in order, for
    ever, and any number of times in rows. Row 0 is the dummy row: its first
    ``dummy_row_pages`` pages are the padding page and never change.

    Callers say what a row shall hold; the thread maps it in the background. What is
    mapped is always a prefix of the row. Any thread may call, and no call waits for
    the driver, except wait(), drain(), check_integrity() and close() (which release
    the GIL). After close() every call but close() raises ValueError.
    """

    def __init__(
        self,
        driver: Driver,
        num_pages: int,
        page_bytes: int,
        num_rows: int,
        pages_per_row: int,
        max_mappings: int = 0,
        dummy_row_pages: int = 1,
    ) -> None:
        """Creates, zeroes and maps everything, checks that two addresses of a page
        are the same memory, and starts the mapping thread.

        ``page_bytes`` is a multiple of the driver's granularity. ``max_mappings``
        bounds the pages mapped in rows, the dummy row aside (0: the driver's own
        budget); what is beyond waits until others are unmapped. On failure
        everything is given back.
        """
    def home(self) -> DLPackView:
        """uint8, stripes * (num_pages + 2) * page_bytes, on the driver's device.

        A view keeps the space alive, but close() takes its memory away: touching it
        then is a crash.
        """
    def rows(self) -> DLPackView:
        """uint8, stripes * num_rows * pages_per_row * page_bytes. Mostly addresses
        without memory: touch only what ready() says is mapped."""
    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """Of one stripe."""
    @property
    def stripes(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def pages_per_row(self) -> int: ...
    @property
    def guard_page(self) -> int: ...
    @property
    def physical_bytes(self) -> int:
        """Of all pages, all stripes."""
    @property
    def home_address(self) -> int: ...
    @property
    def rows_address(self) -> int: ...
    @property
    def granularity(self) -> int: ...
    def acquire_row(self) -> int:
        """A clean row, now live; 0 if there is none now: then retired rows are
        cleaned and a later call finds one."""
    def map(self, row: int, index: int, pages: Sequence[int]) -> None:
        """The row's pages from ``index`` on shall be these (0..num_pages + 1).

        ``index`` is where the row ends now (``len(row_pages(row))``): to replace
        pages, truncate first.
        """
    def truncate(self, row: int, index: int) -> None:
        """The row shall end at page ``index``: one unmap of what is beyond.

        ready() falls to ``index`` at once. Clears error(row), so after an error
        ``truncate(row, ready(row))`` and another map() try again.
        """
    def ready(self, row: int) -> int:
        """Leading pages of the row that are mapped as wanted. Lock-free."""
    def wait(self, row: int, count: int, timeout_s: float) -> bool:
        """Waits until ``ready(row) >= count``, with this row's maps done first.

        False on timeout, or as soon as the row has an error or is retired.
        """
    def prefer(self, rows: Sequence[int]) -> None:
        """What these rows want mapped now is done before the others'."""
    def error(self, row: int) -> str:
        """The driver error that stopped this row's maps, or "". The row stays
        consistent: what ready() counts is mapped."""
    def retire_row(self, row: int) -> None:
        """Nobody will touch the row again. Its unfinished maps are dropped.

        It becomes clean after one unmap call: soon on the host; on CUDA, where that
        stalls the GPU, when clean() asks, when fewer than a quarter of the rows are
        clean or mappings exceed 3/4 of the budget (a bounded trickle), or when
        nothing can go on without it.
        """
    def clean(self, max_rows: int = -1) -> None:
        """Asks for the unmapping of retired rows now: all, or at most max_rows; 0 takes
        back what was asked for, but for a call in flight."""
    def drain(self, timeout_s: float) -> bool:
        """Waits until the mapping thread has nothing left to do; False on timeout."""
    def row_pages(self, row: int) -> list[int]:
        """The pages that the row shall hold, in order."""
    def stats(self) -> dict[str, int]:
        """Counters: map_calls (a run of consecutive pages each), pages_mapped,
        unmap_calls, pages_unmapped, map_ns (with set_access), unmap_ns,
        set_access_calls, waits (that had to wait), wait_ns, errors (failed calls).
        Gauges: mappings, max_mappings (0: no limit), queued_jobs (rows with
        something to do), rows_clean, rows_live, rows_retired (row 0 is in none)."""
    def check_integrity(self) -> list[str]:
        """Compares what should be mapped, everywhere, with what the system says is
        (/proc/self/maps; cuMemRetainAllocationHandle). Empty: they agree."""
    def close(self) -> None:
        """Stops the thread, unmaps and frees everything. Idempotent. Goes on after
        an error and raises the first."""
