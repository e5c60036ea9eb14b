"""What a caller holds for a read or write of a record in flight."""

import threading
import time
from collections.abc import Callable, Sequence

from offload.errors import OffloadError, StorageError
from offload.storage.extents import Move
from offload.storage.store_paths import PathTicket


class StoreTicket:
    """The transfers of one read or write of a record.

    Attributes:
        counted_bytes: What the store's counters have of it, padding included.

    A written version is current, and what was read is verified, once `wait` has returned.

    Ownership: The caller's memory belongs to the store until `wait` has returned or raised an
        OffloadError; then no transfer touches it any more.
    Concurrency: Any thread may wait, any number of times; each wait gives the same outcome. What
        a ticket that nobody has any more wrote is given up.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        tickets: Sequence[PathTicket],
        *,
        outcome: Callable[[Move, StorageError | None], OffloadError | None],
        settle: Callable[["StoreTicket", OffloadError | None], None],
        retry: Callable[[Move, OffloadError], "StoreTicket | None"] | None = None,
    ) -> None:
        """Stores its arguments.

        Args:
            moves: What is moved.
            tickets: The transfers, one for each move.
            outcome: Gives the error of a move, from that of its transfer or from what it brought.
            settle: Called once, when all transfers are over.
            retry: Starts the whole over after an error where that can help; else gives None.
        """
        self.counted_bytes = 0
        self._moves = moves
        self._tickets = tickets
        self._outcome = outcome
        self._settle = settle
        self._retry = retry
        self._replacement: StoreTicket | None = None
        self._lock = threading.Lock()
        self._is_settled = False
        self._error: OffloadError | None = None
        self._failed: Move | None = None

    def done(self) -> bool:
        """Returns whether `wait` would return or raise without waiting for a transfer."""
        if self._replacement is not None:
            return self._replacement.done()
        return all(ticket.done() for ticket in self._tickets)

    def notify(self, event_fd: int | None) -> None:
        """Has an eventfd count each transfer that ends, or has; None takes it back.

        A write that is started over after an error reports nothing: its `wait` is short.
        """
        for ticket in self._tickets:
            ticket.notify(event_fd)

    def waits_for(self) -> int | None:
        """Returns the index of a path that a transfer of this is in flight on, if there is one."""
        for move, ticket in zip(self._moves, self._tickets, strict=True):
            if not ticket.done():
                return move.path_index
        return None

    def wait_part(self) -> bool:
        """Waits for the transfer whose path `waits_for` names, and raises nothing of it.

        Returns:
            False if there is none, and `wait` has no transfer left to wait for.
        """
        for ticket in self._tickets:
            if not ticket.done():
                self._wait_quietly(ticket, None)
                return True
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until all transfers are over.

        Raises:
            TimeoutError: They are not yet; the ticket is as it was.
            StorageError: A transfer failed.
            CorruptStateError: What was read is not what was written.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for ticket in self._tickets:
            self._wait_quietly(ticket, deadline)
        with self._lock:
            if not self._is_settled:
                self._error = self._first_error()
                self._is_settled = True
                self._settle(self, self._error)
                if self._error is not None and self._retry is not None and self._failed:
                    self._replacement = self._retry(self._failed, self._error)
        if self._replacement is not None:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._replacement.wait(left_s)
        elif self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Ends a ticket whose transfers are over and that nobody will wait for."""
        with self._lock:
            if not self._is_settled:
                self._is_settled = True
                self._settle(self, StorageError("nobody waits for it"))

    def _first_error(self) -> OffloadError | None:
        for move, ticket in zip(self._moves, self._tickets, strict=True):
            failure: StorageError | None = None
            try:
                ticket.wait()
            except StorageError as error:
                failure = error.with_traceback(None)  # whose frames have the caller's memory
            outcome = self._outcome(move, failure)
            if outcome is not None:
                outcome.__cause__ = failure
                self._failed = move
                return outcome
        return None

    @staticmethod
    def _wait_quietly(ticket: PathTicket, deadline: float | None) -> None:
        """Waits for one transfer; its error is found again by `_first_error`, when all are over."""
        remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            ticket.wait(remaining_s)
        except StorageError:
            return
