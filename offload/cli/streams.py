"""Standard streams that are closed, or that nobody reads any more."""

import contextlib
import os
import sys
from typing import IO


def open_closed_streams() -> None:
    """Opens those of the process's standard streams that are closed, on the null device.

    Else files that are opened later, such as a store's, take their numbers: what a library writes
    to standard error would go into them.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        setattr(sys, name, os.fdopen(opened, "r" if fd == 0 else "w", closefd=False))


def discard(stream: IO[str]) -> None:
    """Sends what is written to `stream` nowhere, what it still holds included."""
    with contextlib.suppress(OSError, ValueError):  # no file behind it
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
