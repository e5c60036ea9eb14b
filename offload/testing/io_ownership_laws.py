"""Laws of the I/O engine: memory is the engine's until its transfer is over."""

import gc
import os
import threading
import weakref

import numpy as np

from offload.sizes import MIB
from offload.storage.engine import Engine, Priority
from offload.storage.file import StorageFile
from offload.testing.io_cases import (
    WAIT_S,
    random_bytes,
    start_slow_reads,
    wait_all,
)
from offload.testing.io_laws import IOLaws


class OwnershipLaws(IOLaws):
    """Memory is the engine's until its transfer is over."""

    def test_memory_lives_until_the_transfer_is_over(
        self, engine: Engine, file: StorageFile
    ) -> None:
        written = random_bytes(16 * MIB)
        source = np.frombuffer(written, np.uint8).copy()
        alive = weakref.ref(source)

        ticket = engine.write(file, 0, source)
        del source
        gc.collect()
        ticket.wait()

        assert os.pread(file.fd, len(written), 0) == written
        _assert_dies(alive)

    def test_a_dropped_ticket_is_carried_out(self, file: StorageFile) -> None:
        parts = [random_bytes(MIB) for _ in range(20)]

        with self.make_engine() as engine:
            for i, part in enumerate(parts):
                engine.write(file, i * MIB, bytearray(part))

        assert file.path.read_bytes() == b"".join(parts)

    def test_memory_cannot_be_resized_in_flight(self, file: StorageFile) -> None:
        def try_once(engine: Engine) -> bool:
            slow = start_slow_reads(engine, file)
            memory = bytearray(1)
            last = engine.read(file, 0, memory, priority=Priority.WRITE_BACK)
            try:
                memory.extend(b"more")
            except BufferError:
                was_refused = True
            else:
                was_refused = False
            last.wait(WAIT_S)
            wait_all(slow)
            return was_refused

        self._assert_happens(try_once, file)


def _assert_dies(reference: "weakref.ref[np.ndarray]") -> None:
    # An idle thread may hold its last call's arguments a moment longer than the ticket.
    for _ in range(1000):
        gc.collect()
        if reference() is None:
            return
        threading.Event().wait(0.001)
    raise AssertionError("the memory is still held after the transfer")
