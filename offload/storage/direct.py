"""O_DIRECT: which alignment a file needs, and whether its file system really takes it."""

import ctypes
import errno
import functools
import mmap
import os
import struct
from typing import Any

DEFAULT_ALIGNMENT = 4096
"""Assumed where the kernel does not tell: a multiple of the logical block of common devices."""

_STATX_DIOALIGN = 0x2000  # linux/stat.h, Linux 6.1
_STATX_BYTES = 256
_STATX_MASK_OFFSET = 0
_STATX_DIO_OFFSET = 152  # stx_dio_mem_align, stx_dio_offset_align
_AT_EMPTY_PATH = 0x1000


def direct_alignment(fd: int) -> int | None:
    """Returns the bytes that address, offset and length must be multiples of.

    None if the kernel says that the file does not support O_DIRECT.

    Source: statx(2), STATX_DIOALIGN.
    """
    statx = _statx()
    if statx is None:
        return DEFAULT_ALIGNMENT
    result = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result) != 0:
        return DEFAULT_ALIGNMENT
    (mask,) = struct.unpack_from("=I", result, _STATX_MASK_OFFSET)
    if not mask & _STATX_DIOALIGN:
        return DEFAULT_ALIGNMENT
    memory_align, offset_align = struct.unpack_from("=II", result, _STATX_DIO_OFFSET)
    return max(memory_align, offset_align) or None


def accepts_direct(fd: int, *, alignment: int, may_write: bool) -> bool:
    """Tries one aligned transfer, since some file systems accept the flag and refuse the transfer.

    A file with bytes is read; an empty one is written and truncated again, if `may_write`.
    """
    with mmap.mmap(-1, max(alignment, mmap.PAGESIZE)) as memory:
        view = memoryview(memory)[:alignment]
        try:
            if os.fstat(fd).st_size or not may_write:
                os.preadv(fd, [view], 0)
            else:
                _probe_write(fd, view)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        finally:
            view.release()
    return True


def _probe_write(fd: int, view: memoryview) -> None:
    try:
        os.pwritev(fd, [view], 0)
    finally:
        os.ftruncate(fd, 0)


@functools.cache
def _statx() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None)  # glibc 2.28, musl 1.2.5
