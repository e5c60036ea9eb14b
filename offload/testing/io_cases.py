"""Transfers and memory for the laws of the I/O engine."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offload.errors import StorageError
from offload.sizes import MIB
from offload.storage.engine import Engine, Priority, Ticket
from offload.storage.file import StorageFile, open_file

ALIGNMENT = 4096
ATTEMPTS = 50
"""A law about something still in flight is tried so often, should a transfer be too quick."""
WAIT_S = 60.0
"""Only a hang takes so long."""
SLOW_BYTES = 16 * MIB


def errno_of(ticket: Ticket) -> int | None:
    """Waits, and returns the `errno` of what failed."""
    try:
        ticket.wait(WAIT_S)
    except StorageError as error:
        return error.errno
    return None


def start_slow_reads(engine: Engine, file: StorageFile) -> list[Ticket]:
    """Starts two reads that take a moment, the least urgent of all."""
    return [
        engine.read(file, 0, np.empty(SLOW_BYTES, np.uint8), priority=Priority.WRITE_BACK)
        for _ in range(2)
    ]


def open_direct(path: Path) -> StorageFile:
    """Opens a direct file; skips the test where there are none."""
    try:
        return open_file(path, create=True, direct=True)
    except StorageError as error:
        if error.errno == errno.EINVAL:
            pytest.skip(f"no O_DIRECT here: {error}")
        raise


def random_bytes(num_bytes: int) -> bytes:
    """Returns that many bytes, always the same."""
    return np.random.default_rng(num_bytes).bytes(num_bytes)


def aligned(num_bytes: int) -> np.ndarray:
    """Returns zeros that start at a multiple of the alignment."""
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def wait_all(tickets: list[Ticket]) -> None:
    """Waits for each."""
    for ticket in tickets:
        ticket.wait(WAIT_S)


def run_threads(num: int, work: Callable[[int], None]) -> None:
    """Runs `work(0)`, `work(1)`, … in threads of their own, and raises the first error."""
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001  # raised below, in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
