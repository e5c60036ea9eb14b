"""The C library's heap, which keeps freed memory unless it is told to give it back."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from mmap import PAGESIZE

from offload.sizes import KIB, MIB

# Source: mallopt(3) and glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_FIRST_MMAP_THRESHOLD = 128 * KIB
"""Blocks of this size have a mapping of their own until glibc raises the threshold."""
_LAST_MMAP_THRESHOLD = 32 * MIB
"""glibc raises it no further."""


def trim_heap() -> bool:
    """Returns freed heap memory to the kernel; False where the C library cannot.

    Source: malloc_trim(3).
    """
    trim = _function("malloc_trim")
    return trim is not None and bool(trim(0))


class HeapHoles:
    """Keeps the resident part of the heap near the most that was in use of it at one time.

    A forward leaves holes between the activations that it keeps, into which none of the next
    layer's fits, nor a gradient: the heap grows instead, and the holes stay resident. Backward
    frees activations and fills holes that had gone back to the kernel. What is resident of the heap
    is told from all that is, of which the rest is known from when no hole was.
    """

    def __init__(self) -> None:
        self._most_used_bytes = 0
        self._other_bytes = 0  # resident, and not of the heap

    def limit(self, num_bytes: int) -> bool:
        """Returns holes to the kernel if more than `num_bytes` may be resident; tells whether.

        Memory that was touched since the last time, and is not of the heap, counts too: then once.
        """
        info = _function("mallinfo2")
        # The C library walks all that is free, so it is not asked where nothing has grown.
        if info is None or not self._is_beyond(num_bytes):
            return False
        info.restype = _HeapInfo  # type: ignore[attr-defined]
        found: _HeapInfo = info()  # type: ignore[assignment]
        self._most_used_bytes = max(self._most_used_bytes, found.uordblks)
        if not self._is_beyond(num_bytes):
            return False
        was_trimmed = trim_heap()
        self._other_bytes = _resident_bytes() - found.uordblks
        return was_trimmed

    def _is_beyond(self, num_bytes: int) -> bool:
        return _resident_bytes() - self._other_bytes > self._most_used_bytes + num_bytes


def _resident_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY)  # `pathlib` takes longer than the kernel
    try:
        return int(os.read(file, 128).split()[1]) * PAGESIZE
    finally:
        os.close(file)


class _HeapInfo(ctypes.Structure):
    """Source: mallinfo(3), `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Keeps blocks that are taken in this context out of the heap, all but small ones.

    glibc raises its threshold for mapping a block on its own with the blocks it frees, up to
    32 MiB. A model that is built while others of its parameters are evicted, or moved to an arena,
    then fills the heap, and leaves holes over as many bytes as it has; what steps take later is
    strewn over these holes, and no page of them ever goes back. Mapped blocks leave none.

    Afterwards the threshold is the highest that glibc raises it to by itself: steps take the same
    blocks again and again, and mapping each anew would cost them time. A threshold that the
    environment sets is left as it is.
    """
    option = None if _is_chosen_by_user("mmap_threshold") else _function("mallopt")
    if option is None:
        yield
        return
    option(_MMAP_THRESHOLD, _FIRST_MMAP_THRESHOLD)
    try:
        yield
    finally:
        option(_MMAP_THRESHOLD, _LAST_MMAP_THRESHOLD)
        if not _is_chosen_by_user("trim_threshold"):
            option(_TRIM_THRESHOLD, 2 * _LAST_MMAP_THRESHOLD)


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    """Returns a function of the C library, which is opened once: forwards call them."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def _is_chosen_by_user(threshold: str) -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return f"MALLOC_{threshold.upper()}_" in os.environ or f"malloc.{threshold}=" in tunables
