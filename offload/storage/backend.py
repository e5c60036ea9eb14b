"""What the engine asks of a backend."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from offload.storage.buffer import BufferView
from offload.storage.transfer import Completion, Transfer

NUM_LATENCIES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was opened: bytes that the kernel moved, requests that are done.

    They include what failed requests moved before the error.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    read_requests: int = 0
    write_requests: int = 0

    def __add__(self, other: "EngineStats") -> "EngineStats":
        return EngineStats(
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            read_requests=self.read_requests + other.read_requests,
            write_requests=self.write_requests + other.write_requests,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """Counters of a backend since it was opened; they add up."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_requests: int = 0
    write_requests: int = 0
    in_flight_s: float = 0.0
    """Time in which at least one request was not done."""
    read_in_flight_s: float = 0.0
    """Time in which at least one read was not done."""
    write_in_flight_s: float = 0.0
    both_bytes: int = 0
    """Moved while reads and writes were not done."""
    read_s: float = 0.0
    """Sum of the latencies, from the start of a request until it was done."""
    write_s: float = 0.0
    read_latencies: tuple[int, ...] = (0,) * NUM_LATENCIES
    """Element i: the requests that took 2^i to 2^(i+1) microseconds; those at both ends also
    what is shorter, or longer."""
    write_latencies: tuple[int, ...] = (0,) * NUM_LATENCIES
    registered_memory_pieces: int = 0
    """Pieces of transfers whose memory the kernel had been told of."""
    registered_file_pieces: int = 0
    """Pieces of transfers whose file the kernel had been told of."""

    def engine_stats(self) -> EngineStats:
        """Returns the bytes and requests alone."""
        return EngineStats(**{each.name: getattr(self, each.name) for each in fields(EngineStats)})

    def __add__(self, other: "BackendStats") -> "BackendStats":
        return BackendStats(
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            read_requests=self.read_requests + other.read_requests,
            write_requests=self.write_requests + other.write_requests,
            in_flight_s=self.in_flight_s + other.in_flight_s,
            read_in_flight_s=self.read_in_flight_s + other.read_in_flight_s,
            write_in_flight_s=self.write_in_flight_s + other.write_in_flight_s,
            both_bytes=self.both_bytes + other.both_bytes,
            read_s=self.read_s + other.read_s,
            write_s=self.write_s + other.write_s,
            read_latencies=_sums(self.read_latencies, other.read_latencies),
            write_latencies=_sums(self.write_latencies, other.write_latencies),
            registered_memory_pieces=self.registered_memory_pieces + other.registered_memory_pieces,
            registered_file_pieces=self.registered_file_pieces + other.registered_file_pieces,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStats:
    """The queue of one path, and its counters since the engine was opened."""

    root: Path | None
    backend: str
    queue_depth: int
    block_bytes: int
    counters: BackendStats


class Request(Protocol):
    """A transfer that a backend has taken.

    Concurrency: Any thread, also several at once.
    """

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until the transfer is over; False if `timeout_s` passed before.

        A signal handler that raises ends the waiting, not the transfer.
        """

    def is_done(self) -> bool:
        """Tells whether the transfer is over, without waiting."""

    def completion(self) -> Completion:
        """Returns how a transfer that is over ended."""

    def notify(self, event_fd: int | None) -> bool:
        """Has 1 added to an eventfd when the transfer is over, or now if it is.

        Only one at a time: False if there is another. None takes it back; then the descriptor may
        be closed.
        """


class Backend(Protocol):
    """Carries out transfers on threads of its own.

    Transfers are cut into pieces of `block_bytes`, at most `queue_depth` in flight; a more urgent
    priority starts first; short transfers, EINTR and EAGAIN are continued; a read beyond the end
    of the file is ENODATA. `offload.testing.io_conformance` holds the laws.
    """

    name: str

    def open(self) -> None:
        """Takes threads and kernel resources.

        Raises:
            StorageError: This machine refuses them.
        """

    def submit(self, transfer: Transfer) -> Request:
        """Starts `transfer`, whose arguments the engine has checked, and returns at once.

        Ownership: The caller keeps the memory alive until the request is done.
        Concurrency: Any thread, but never while `close()` runs or later.
        """

    def cancel(self) -> None:
        """Starts no further piece of what was submitted; that ends with ECANCELED.

        Does not wait. Pieces in flight end as they would have.
        """

    def register(self, view: BufferView) -> bool:
        """Announces memory that many transfers will use, until `unregister` or `close`.

        Returns False if that has no effect here.
        """

    def unregister(self, view: BufferView) -> None:
        """Takes `register` back; no transfer may be using the memory."""

    def stats(self) -> BackendStats:
        """Returns the counters, also after `close()`; a request that is done is in them."""

    def close(self) -> None:
        """Carries out what was submitted, then gives everything back."""


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
