"""The C library's heap, which keeps freed memory unless it is told to give it back."""

import ctypes


def trim_heap() -> bool:
    """Returns freed heap memory to the kernel; False where the C library cannot.

    Source: malloc_trim(3). glibc raises its threshold for mapping a block on its own with the
        blocks it frees, up to 32 MiB: parameters that were built and moved to an arena leave
        holes in the heap that no later block fits exactly.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
