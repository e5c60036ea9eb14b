"""A tier's hard limit: what is leased now, the most there has been, and who holds it."""

import threading
from collections import Counter

from offload.errors import BudgetError
from offload.sizes import format_size


class Budget:
    """Counts leased bytes of one tier and refuses what does not fit.

    Concurrency: Any thread.
    """

    def __init__(self, capacity_bytes: int, *, tier: str, within: "Budget | None" = None) -> None:
        """Stores its arguments.

        Args:
            within: A budget that this one is a part of: what is leased here is leased there.
        """
        self.capacity_bytes = capacity_bytes
        self.tier = tier
        self._within = within
        self._lock = threading.RLock()  # a dying storage releases from inside any allocation
        self._leased = Counter[str]()
        self._leased_bytes = 0
        self._peak_bytes = 0

    @property
    def leased_bytes(self) -> int:
        return self._leased_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes leased at one time."""
        return self._peak_bytes

    def lease(self, num_bytes: int, purpose: str) -> None:
        """Takes `num_bytes` for `purpose`.

        Raises:
            BudgetError: They do not fit; nothing was taken.
        """
        with self._lock:
            if self._leased_bytes + num_bytes > self.capacity_bytes:
                raise BudgetError(self._refusal(num_bytes, purpose))
            if self._within is not None:
                self._within.lease(num_bytes, purpose)
            self._leased_bytes += num_bytes
            self._leased[purpose] += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._leased_bytes)

    def release(self, num_bytes: int, purpose: str) -> None:
        """Gives back what `lease` took under the same purpose."""
        with self._lock:
            self._leased_bytes -= num_bytes
            self._leased[purpose] -= num_bytes
            if self._within is not None:
                self._within.release(num_bytes, purpose)

    def _refusal(self, num_bytes: int, purpose: str) -> str:
        held = ", ".join(
            f"{name} {format_size(size)}" for name, size in self._leased.items() if size
        )
        free = self.capacity_bytes - self._leased_bytes
        return (
            f"cannot lease memory for {purpose} on tier `{self.tier}`: needs "
            f"{format_size(num_bytes)}, {format_size(free)} of "
            f"{format_size(self.capacity_bytes)} free, leased: {held or 'nothing'}; raise "
            f"`tiers.{self.tier}.memory`"
        )
