"""Slots of one size, leased and given back."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch

from offload.memory.budget import Budget

Region = memoryview | torch.Tensor
"""Memory that slots are cut from: bytes of the host, or a uint8 tensor on a device."""
R = TypeVar("R", bound=Region)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slot(Generic[R]):
    """One fixed-size place in a pool. Its bytes belong to whoever leases it."""

    index: int
    memory: R


class SlotPool(Generic[R]):
    """Slots of one size cut from one region of an arena.

    Concurrency: Any thread; the slots that storages give back may come from autograd's threads.
    """

    def __init__(self, region: R, *, slot_bytes: int, budget: Budget, purpose: str) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = len(region) // slot_bytes if slot_bytes else 0
        self._budget = budget
        self._purpose = purpose
        self._lock = threading.RLock()  # a dying storage releases from inside any allocation
        self._free = deque(
            Slot(index=i, memory=cast(R, region[i * slot_bytes : (i + 1) * slot_bytes]))
            for i in range(self.num_slots)
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_lease(self) -> Slot[R] | None:
        """Returns a free slot, or None."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()  # the one touched last: untouched memory stays untouched
        self._budget.lease(self.slot_bytes, self._purpose)
        return slot

    def release(self, slot: Slot[R]) -> None:
        """Gives `slot` back; its bytes may be overwritten from now on."""
        self._budget.release(self.slot_bytes, self._purpose)
        with self._lock:
            self._free.append(slot)
