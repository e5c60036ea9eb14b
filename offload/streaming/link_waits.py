"""Waits for copies over the link to a device, beside those of fetches."""

import contextlib
import time
from collections.abc import Iterator

from offload.devices import Device
from offload.storage.stalls import LINK, StallAccount


class LinkWaits:
    """Counts for how long the calling thread waited for copies of gradients and updates.

    Only where what is computed is there when its call returns: elsewhere who waits for a copy waits
    for what it copies too.

    Attributes:
        wait_s: Since the beginning.
        stalls: The account to which they are added.

    Concurrency: The thread that runs the model.
    """

    def __init__(self, device: Device, stalls: StallAccount) -> None:
        self.wait_s = 0.0
        self._counts = not device.computes_later
        self.stalls = stalls

    @contextlib.contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Counts the time within as a wait that has this cause."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            if self._counts:
                duration_s = time.perf_counter() - started_s
                self.wait_s += duration_s
                self.stalls.add(LINK, cause, duration_s)
