"""Counts what a backend in Python does."""

import threading
import time

from offload.storage.backend import NUM_LATENCIES, BackendStats
from offload.storage.transfer import Operation


class Counters:
    """Bytes, requests and their latencies since the backend was opened.

    Concurrency: Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(Operation, 0)
        self._requests = dict.fromkeys(Operation, 0)
        self._latency_s = dict.fromkeys(Operation, 0.0)
        self._latencies = {operation: [0] * NUM_LATENCIES for operation in Operation}
        self._num_in_flight = dict.fromkeys(Operation, 0)
        self._counted_s = 0.0
        self._in_flight_s = 0.0
        self._each_in_flight_s = dict.fromkeys(Operation, 0.0)
        self._both_bytes = 0

    def begin(self, operation: Operation) -> float:
        """Counts a request that starts now; returns what `end` is to be given."""
        now_s = time.monotonic()
        with self._lock:
            self._count_time(now_s)
            self._num_in_flight[operation] += 1
        return now_s

    def move(self, operation: Operation, num_bytes: int) -> None:
        """Counts bytes that the kernel moved."""
        with self._lock:
            self._bytes[operation] += num_bytes
            self._both_bytes += num_bytes if all(self._num_in_flight.values()) else 0

    def end(self, operation: Operation, begun_s: float) -> None:
        """Counts a request that is done."""
        now_s = time.monotonic()
        with self._lock:
            self._requests[operation] += 1
            self._latency_s[operation] += now_s - begun_s
            self._latencies[operation][_latency_index(now_s - begun_s)] += 1
            self._count_time(now_s)
            self._num_in_flight[operation] -= 1

    def stats(self) -> BackendStats:
        """Returns the counters as they are now."""
        with self._lock:
            self._count_time(time.monotonic())
            return BackendStats(
                read_bytes=self._bytes[Operation.READ],
                write_bytes=self._bytes[Operation.WRITE],
                read_requests=self._requests[Operation.READ],
                write_requests=self._requests[Operation.WRITE],
                in_flight_s=self._in_flight_s,
                read_in_flight_s=self._each_in_flight_s[Operation.READ],
                write_in_flight_s=self._each_in_flight_s[Operation.WRITE],
                both_bytes=self._both_bytes,
                read_s=self._latency_s[Operation.READ],
                write_s=self._latency_s[Operation.WRITE],
                read_latencies=tuple(self._latencies[Operation.READ]),
                write_latencies=tuple(self._latencies[Operation.WRITE]),
            )

    def _count_time(self, now_s: float) -> None:
        """Counts the time since the last call by what was in flight; the lock is held."""
        elapsed_s = max(now_s - self._counted_s, 0.0)
        self._counted_s = max(now_s, self._counted_s)
        self._in_flight_s += elapsed_s if any(self._num_in_flight.values()) else 0.0
        for operation, number in self._num_in_flight.items():
            self._each_in_flight_s[operation] += elapsed_s if number else 0.0


def _latency_index(latency_s: float) -> int:
    return min(max(int(latency_s * 1e6).bit_length() - 1, 0), NUM_LATENCIES - 1)
