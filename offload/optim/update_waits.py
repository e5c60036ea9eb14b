"""How long the thread that runs a model waited for updates that run in another."""

import time
from collections.abc import Mapping

from offload.optim.pipeline import UpdatePipeline
from offload.storage.stalls import KERNEL, StallAccount


class UpdateWaits:
    """Adds waits up, and divides each between storage and kernels by what the updates waited for.

    Attributes:
        wait_s: Of all waits.
        io_wait_s: The part of it in which the updates waited for storage.

    Concurrency: The thread that runs the model.
    """

    def __init__(self, stalls: StallAccount, *, cause: str) -> None:
        self.wait_s = 0.0
        self.io_wait_s = 0.0
        self._stalls = stalls
        self._cause = cause

    def add(
        self, pipeline: UpdatePipeline, *, started_s: float, io_before: Mapping[str, float]
    ) -> float:
        """Adds a wait that ends now, and returns its length.

        Args:
            pipeline: Carries the updates out.
            started_s: By `time.perf_counter`.
            io_before: `pipeline.io_waits()` at that time.
        """
        waited_s = time.perf_counter() - started_s
        each_s = {
            label: duration_s - io_before.get(label, 0.0)
            for label, duration_s in pipeline.io_waits().items()
            if duration_s > io_before.get(label, 0.0)
        }
        io_s = min(sum(each_s.values()), waited_s)
        self.wait_s += waited_s
        self.io_wait_s += io_s
        for label, duration_s in each_s.items():
            self._stalls.add(label, self._cause, duration_s * io_s / sum(each_s.values()))
        if waited_s > io_s:
            self._stalls.add(KERNEL, self._cause, waited_s - io_s)
        return waited_s
