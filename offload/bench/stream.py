"""Streams of transfers over one file, and what they took."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offload.bench.bench_file import BenchMemory
from offload.errors import ConfigError
from offload.sizes import MIB
from offload.storage.engine import Engine, Priority, Ticket
from offload.storage.file import StorageFile
from offload.storage.transfer import Operation

_REQUEST_BYTES = 4 * MIB
"""The engine cuts requests into blocks. Few large ones keep Python out of the measurement."""
_SPARE_REQUESTS = 4
"""Asked for beyond what the queue depth holds: a few milliseconds in which this thread may wait for
a processor while the engine goes on."""
_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Bytes moved up to a moment of a stream."""

    at_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a stream moved, and in what time; `cpu_s` of the whole process."""

    read_bytes: int
    write_bytes: int
    seconds: float
    cpu_s: float
    samples: tuple[Sample, ...]

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


class Budget:
    """Bytes to move, which several streams may share: each takes what it has room for.

    Concurrency: Any thread.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._left_bytes = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Takes bytes; False if none are left."""
        with self._lock:
            if self._left_bytes <= 0:
                return False
            self._left_bytes -= num_bytes
            return True

    def stop(self) -> None:
        """Leaves nothing to take."""
        with self._lock:
            self._left_bytes = 0


class Stream:
    """Sequential transfers over a file, from its start again at its end.

    Always as much is asked for as the queue depth can hold, and a little more.

    Concurrency: One thread at a time.
    """

    def __init__(
        self,
        engine: Engine,
        file: StorageFile,
        *,
        size_bytes: int,
        block_bytes: int,
        queue_depth: int,
    ) -> None:
        _check_block(file, block_bytes)
        self._engine = engine
        self._file = file
        self._block_bytes = block_bytes
        self._queue_depth = queue_depth
        self._request_bytes = _request_bytes(block_bytes, size_bytes=size_bytes)
        self._size_bytes = size_bytes - size_bytes % self._request_bytes
        in_flight = block_bytes * queue_depth
        self._num_requests = -(-in_flight // self._request_bytes) + _SPARE_REQUESTS
        self._memory = BenchMemory(self._num_requests * self._request_bytes)
        self._engine.register(self._memory.bytes)
        self._next_offset = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of the file that are used: whole requests."""
        return self._size_bytes

    def close(self) -> None:
        """Gives the memory back."""
        self._engine.unregister(self._memory.bytes)

    def move(
        self,
        operations: Sequence[Operation],
        budget: Budget,
        *,
        flush: bool = False,
        in_small_parts: bool = False,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> Moved:
        """Moves the budget's bytes with `operations` in turn.

        Args:
            operations: Both: so finely in turn that both are in flight all the time.
            budget: What is to be moved.
            flush: Ends with a flush, whose time counts.
            in_small_parts: Takes no more of the budget at one time than keeps the queue full: a
                slow path must not end long after the others.
            on_sample: Called twenty times a second at most.
        """
        is_small = in_small_parts or len(operations) > 1
        num_bytes = self._turn_bytes() if is_small else self._request_bytes
        memory = self._memory.bytes
        if is_small:
            num_requests = max(2, -(-self._block_bytes * self._queue_depth // num_bytes) + 1)
            memory = memory[: num_requests * num_bytes]
        run = _Run(self._engine, self._file, memory, num_bytes, on_sample)
        turn = 0
        while budget.take(num_bytes):
            run.submit(operations[turn % len(operations)], self._advance(num_bytes))
            turn += 1
        run.drain()
        if flush:
            self._engine.flush(self._file)
        return run.moved()

    def rewind(self) -> None:
        """Goes on at the start of the file."""
        self._next_offset = 0

    def drop_cache(self) -> None:
        """Has the kernel forget what it keeps of a buffered file."""
        self._engine.flush(self._file)
        os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _turn_bytes(self) -> int:
        """Requests of a mix: at least four are in flight, where the depth has room for them."""
        blocks = max(1, min(self._queue_depth // 4, self._request_bytes // self._block_bytes))
        while self._request_bytes % (blocks * self._block_bytes):
            blocks -= 1
        return blocks * self._block_bytes

    def _advance(self, num_bytes: int) -> int:
        if self._next_offset + num_bytes > self._size_bytes:
            self._next_offset = 0
        offset = self._next_offset
        self._next_offset += num_bytes
        return offset


class _Run:
    """One stream from its first request to its last."""

    def __init__(
        self,
        engine: Engine,
        file: StorageFile,
        memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]",
        num_bytes: int,
        on_sample: Callable[[Sample], None] | None,
    ) -> None:
        self._engine = engine
        self._file = file
        self._on_sample = on_sample
        self._num_bytes = num_bytes
        self._idle = [memory[at : at + num_bytes] for at in range(0, len(memory), num_bytes)]
        self._in_flight: deque[_InFlight] = deque()
        self._moved = dict.fromkeys(Operation, 0)
        self._samples: list[Sample] = []
        self._cpu_s = time.process_time()
        self._started_s = time.perf_counter()

    def submit(self, operation: Operation, offset: int) -> None:
        if not self._idle:
            self._reap()
        memory = self._idle.pop()
        # One priority for both, or one direction would wait for the other.
        start = self._engine.read if operation is Operation.READ else self._engine.write
        ticket = start(self._file, offset, memory, priority=Priority.PREFETCH)
        self._in_flight.append(_InFlight(operation=operation, memory=memory, ticket=ticket))

    def drain(self) -> None:
        while self._in_flight:
            self._reap()

    def moved(self) -> Moved:
        self._sample(always=True)
        return Moved(
            read_bytes=self._moved[Operation.READ],
            write_bytes=self._moved[Operation.WRITE],
            seconds=time.perf_counter() - self._started_s,
            cpu_s=time.process_time() - self._cpu_s,
            samples=tuple(self._samples),
        )

    def _reap(self) -> None:
        oldest = self._in_flight.popleft()
        oldest.ticket.wait()
        self._moved[oldest.operation] += self._num_bytes
        self._idle.append(oldest.memory)
        self._sample(always=False)

    def _sample(self, *, always: bool) -> None:
        at_s = time.perf_counter() - self._started_s
        last_s = self._samples[-1].at_s if self._samples else 0.0
        if not always and at_s - last_s < _SAMPLE_S:
            return
        self._samples.append(Sample(at_s=at_s, num_bytes=sum(self._moved.values())))
        if self._on_sample is not None:
            self._on_sample(self._samples[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    operation: Operation
    memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    ticket: Ticket


def _request_bytes(block_bytes: int, *, size_bytes: int) -> int:
    # Eight requests or more to a small file, so that its ends do not count for much.
    wanted = min(_REQUEST_BYTES, size_bytes // 8)
    return max(block_bytes, wanted - wanted % block_bytes)


def _check_block(file: StorageFile, block_bytes: int) -> None:
    if block_bytes % file.alignment:
        raise ConfigError(
            f"cannot run the benchmark with blocks of {block_bytes} bytes: the file is open for "
            f"direct transfers, expected multiples of {file.alignment} bytes; change `--bs` or "
            "use `--buffered`"
        )
