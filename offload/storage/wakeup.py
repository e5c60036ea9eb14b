"""An event descriptor: one thread waits on it for any of many transfers, or another thread."""

import os
import weakref


class Wakeup:
    """What `StoreTicket.notify` reports to.

    It counts: what came before `wait` ends it at once, so that nothing is missed between a look at
    the transfers and the wait.

    Ownership: The descriptor is closed with this object. Transfers that report to it must have
        been taken back, by `notify(None)`, before.
    Concurrency: Any thread may wake; one waits.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self.fd)

    def wake(self) -> None:
        """Ends the wait that runs now, or else the next."""
        os.eventfd_write(self.fd, 1)

    def wait(self) -> None:
        """Waits for one event or more, and forgets them; goes on after a signal was handled."""
        while True:
            try:
                os.eventfd_read(self.fd)
            except InterruptedError:  # unlike other calls of `os`, it does not go on by itself
                continue
            return

    def close(self) -> None:
        """Closes the descriptor; again does nothing."""
        self._finalizer()
