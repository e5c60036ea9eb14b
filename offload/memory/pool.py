"""Slots of one size, leased and given back."""

import threading
from collections import deque
from dataclasses import dataclass

from offload.memory.budget import Budget


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slot:
    """One fixed-size place in a pool. Its bytes belong to whoever leases it."""

    index: int
    memory: memoryview


class SlotPool:
    """Slots of one size cut from one region of an arena.

    Concurrency: Any thread; the slots that storages give back may come from autograd's threads.
    """

    def __init__(
        self, region: memoryview, *, slot_bytes: int, budget: Budget, purpose: str
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = len(region) // slot_bytes if slot_bytes else 0
        self._budget = budget
        self._purpose = purpose
        self._lock = threading.RLock()  # a dying storage releases from inside any allocation
        self._free = deque(
            Slot(index=i, memory=region[i * slot_bytes : (i + 1) * slot_bytes])
            for i in range(self.num_slots)
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_lease(self) -> Slot | None:
        """Returns a free slot, or None."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()  # the one touched last: untouched memory stays untouched
        self._budget.lease(self.slot_bytes, self._purpose)
        return slot

    def release(self, slot: Slot) -> None:
        """Gives `slot` back; its bytes may be overwritten from now on."""
        self._budget.release(self.slot_bytes, self._purpose)
        with self._lock:
            self._free.append(slot)
