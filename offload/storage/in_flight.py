"""The transfers that are in flight: keeps their memory, and waits for them."""

import threading
from collections import deque
from typing import Protocol

_SWEEP_AT = 64


class Waitable(Protocol):
    """A transfer; once `done()` has returned True it no longer holds its memory."""

    def done(self) -> bool:
        """Tells whether the transfer is over."""

    def wait_done(self) -> None:
        """Waits until the transfer is over; does not raise its error."""


class InFlight:
    """A collection of transfers that forgets those that are done, at the latest when one is added.

    Concurrency: Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: deque[Waitable] = deque()
        self._sweep_at = _SWEEP_AT

    def add(self, transfer: Waitable) -> None:
        """Keeps `transfer` until it is done."""
        with self._lock:
            self._transfers.append(transfer)
            self._forget_done()

    def drain(self) -> None:
        """Waits for all; may be interrupted, and called again."""
        while True:
            with self._lock:
                self._forget_done()
                if not self._transfers:
                    return
                oldest = self._transfers[0]
            oldest.wait_done()

    def _forget_done(self) -> None:
        transfers = self._transfers
        while transfers and transfers[0].done():
            transfers.popleft()
        # One slow transfer at the front must not keep all later ones. The limit grows with what
        # is really in flight, so this costs a constant per transfer.
        if len(transfers) >= self._sweep_at:
            self._transfers = deque(each for each in transfers if not each.done())
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._transfers))
