"""A page of memory of which the kernel tells whether it was written to, whatever was written."""

import ctypes
import functools
import mmap
import os
import struct
import weakref
from typing import Any

import numpy as np

_PAGE_BYTES = mmap.PAGESIZE
_ENTRY_BYTES = 8
# Source: Documentation/admin-guide/mm/pagemap.rst of Linux.
_IS_OF_FILE = 1 << 61
_IS_SWAPPED = 1 << 62
_IS_PRESENT = 1 << 63


class WatchedPage:
    """One page that shows a file's bytes until the first write, which gives it a page of its own.

    So a write shows that leaves every byte what it was. `mlockall` gives all pages of a process
    their own at once, one too that nobody writes to: from then on writes don't show.

    Attributes:
        memory: The page's bytes, writable.

    Ownership: The mapping lives as long as `memory` or anything made of it.
    """

    def __init__(self, content: bytes) -> None:
        """Maps a page that begins with `content`.

        Raises:
            OSError: The kernel maps none, or does not tell.
        """
        address = _map_private(content)
        page: Any = (ctypes.c_char * _PAGE_BYTES).from_address(address)
        self.memory: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(page, dtype=np.uint8)
        finalizer = weakref.finalize(self.memory, _c_library().munmap, address, _PAGE_BYTES)
        finalizer.atexit = False
        self._address = address
        if self.memory[: len(content)].tobytes() != content or self._is_own:
            raise OSError("pages of this process are its own before they are written to")

    @property
    def was_written(self) -> bool:
        """Whether anything was written to the page since it was made, as far as the kernel tells.

        Raises:
            OSError: It does not tell any more, or the process has no descriptor left.
        """
        return self._is_own and not _untouched()._is_own

    @property
    def _is_own(self) -> bool:
        """Whether the page is the process's own, and not the file's."""
        file = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            read = os.pread(file, _ENTRY_BYTES, self._address // _PAGE_BYTES * _ENTRY_BYTES)
        finally:
            os.close(file)
        if len(read) != _ENTRY_BYTES:
            raise OSError(f"the page map has {len(read)} of {_ENTRY_BYTES} bytes of a page")
        (entry,) = struct.unpack("=Q", read)
        return bool(entry & (_IS_PRESENT | _IS_SWAPPED)) and not entry & _IS_OF_FILE


def try_watch(content: bytes) -> WatchedPage | None:
    """Returns a page that begins with `content`; None where the kernel does not tell of writes."""
    try:
        _untouched()
        return WatchedPage(content)
    except OSError:
        return None


@functools.cache
def _untouched() -> WatchedPage:
    """Returns the page of the process that nobody writes to."""
    return WatchedPage(b"")


def _map_private(content: bytes) -> int:
    """Returns the address of a private mapping of a file without a name.

    Not by `mmap.mmap`, which keeps a descriptor for each.
    """
    file = os.memfd_create("offload-watched", os.MFD_CLOEXEC)
    try:
        os.pwrite(file, content.ljust(_PAGE_BYTES, b"\0"), 0)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _c_library().mmap(None, _PAGE_BYTES, access, mmap.MAP_PRIVATE, file, 0)
    finally:
        os.close(file)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


@functools.cache
def _c_library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
