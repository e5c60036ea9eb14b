"""A tier's hard limit: what is leased now, the most there has been, and who holds it."""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from offload.errors import BudgetError
from offload.sizes import format_size


class Leasing(Protocol):
    """What leases memory of a budget and knows itself how much.

    Attributes:
        purpose: What the memory is for.
    """

    purpose: str

    @property
    def leased_bytes(self) -> int: ...


class Budget:
    """Counts leased bytes of one tier and refuses what does not fit.

    Attributes:
        purpose: What it is for, among the leases of the budget that it is a part of.
        lock: What leases and releases take, of the budget and of all that lease from it.

    Concurrency: Any thread.
    """

    def __init__(self, capacity_bytes: int, *, tier: str, within: "Budget | None" = None) -> None:
        """Stores its arguments.

        Args:
            within: A budget that this one is a part of: what is leased here is leased there.
        """
        self.capacity_bytes = capacity_bytes
        self.tier = tier
        self.purpose = "a model"
        self._within = within
        # One for all parts; a dying storage releases from inside any allocation.
        self.lock: threading.RLock = threading.RLock() if within is None else within.lock
        self._leased = Counter[str]()
        self._followed: list[weakref.ref[Leasing]] = []
        self._peak_bytes = 0
        if within is not None:
            within.follow(self)

    @property
    def leased_bytes(self) -> int:
        followed = (each() for each in self._followed)
        others = sum(each.leased_bytes for each in followed if each is not None)
        return sum(self._leased.values()) + others

    @property
    def peak_bytes(self) -> int:
        """Most bytes leased at one time."""
        return self._peak_bytes

    def follow(self, leasing: Leasing) -> None:
        """Counts what `leasing` has leased, as long as it is there."""
        self._followed.append(weakref.ref(leasing))

    @contextlib.contextmanager
    def leasing(self, num_bytes: int, purpose: str) -> Iterator[None]:
        """A context in which who is followed leases `num_bytes`.

        Raises:
            BudgetError: They do not fit; the context is not entered.
        """
        within = self._within
        with self.lock:
            if self.leased_bytes + num_bytes > self.capacity_bytes:
                raise BudgetError(self._refusal(num_bytes, purpose))
            with contextlib.nullcontext() if within is None else within.leasing(num_bytes, purpose):
                yield
            self._peak_bytes = max(self._peak_bytes, self.leased_bytes)

    def lease(self, num_bytes: int, purpose: str) -> None:
        """Takes `num_bytes` for `purpose`.

        Raises:
            BudgetError: They do not fit; nothing was taken.
        """
        with self.leasing(num_bytes, purpose):
            self._leased[purpose] += num_bytes

    def release(self, num_bytes: int, purpose: str) -> None:
        """Gives back what `lease` took under the same purpose."""
        with self.lock:
            self._leased[purpose] -= num_bytes

    def _leased_for(self) -> Counter[str]:
        """Returns what is leased by purpose, that of the parts too."""
        leased = Counter(self._leased)
        for each in (followed() for followed in self._followed):
            if isinstance(each, Budget):
                leased += each._leased_for()
            elif each is not None:
                leased[each.purpose] += each.leased_bytes
        return leased

    def _refusal(self, num_bytes: int, purpose: str) -> str:
        leased = self._leased_for()
        held = ", ".join(f"{name} {format_size(size)}" for name, size in leased.items() if size)
        free = self.capacity_bytes - self.leased_bytes
        return (
            f"cannot lease memory for {purpose} on tier `{self.tier}`: needs "
            f"{format_size(num_bytes)}, {format_size(free)} of "
            f"{format_size(self.capacity_bytes)} free, leased: {held or 'nothing'}; raise "
            f"`tiers.{self.tier}.memory`"
        )
