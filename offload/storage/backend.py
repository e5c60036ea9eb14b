"""What the engine asks of a backend."""

from dataclasses import dataclass
from typing import Protocol

from offload.storage.transfer import Completion, Transfer


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

    def stats(self) -> EngineStats:
        """Returns the counters, also after `close()`; a request that is done is in them."""

    def close(self) -> None:
        """Carries out what was submitted, then gives everything back."""
