"""Slots of one size, leased and given back.

[Note: a lease ends with its bytes]
An interrupt may come between any two steps: after a slot was leased, and before anybody has it to
give it back. So which slots are leased is told by references. Each lease has bytes of its own, an
array or the slot itself, that whatever uses the slot refers to: a storage over it, parts of it, a
transfer in flight. Who is done with a slot releases it; one that was lost is free again when
nothing refers to its bytes. Counts that an interrupt left half made are made anew from that.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch

from offload.memory.budget import Budget

Region = memoryview | torch.Tensor
"""Memory that slots are cut from: bytes of the host, or a uint8 tensor on a device."""
R = TypeVar("R", bound=Region)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Slot(Generic[R]):
    """One lease of a fixed-size place in a pool. Its bytes belong to whoever has it."""

    index: int
    memory: R


class SlotPool(Generic[R]):
    """Slots of one size cut from one region of an arena. See [Note: a lease ends with its bytes].

    Attributes:
        purpose: What the slots are for, in messages of the budget.

    Concurrency: Any thread; the slots that storages give back may come from autograd's threads.
    """

    def __init__(self, region: R, *, slot_bytes: int, budget: Budget, purpose: str) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = len(region) // slot_bytes if slot_bytes else 0
        self.purpose = purpose
        self._budget = budget
        # The budget's, as it is taken inside: a dying storage releases from inside any allocation,
        # such as one under the lock of another pool.
        self._lock = budget.lock
        self._regions = [
            cast(R, region[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(self.num_slots)
        ]
        # The bytes of each lease, by slot; no other slot is leased.
        self._leased: dict[int, weakref.ref[Any]] = {}
        # The others, the one touched last at the end.
        self._free = dict.fromkeys(range(self.num_slots))
        budget.follow(self)

    @property
    def num_free(self) -> int:
        with self._lock:
            return len(self._free_slots())

    @property
    def leased_bytes(self) -> int:
        return len(self._leased) * self.slot_bytes

    def try_lease(self) -> Slot[R] | None:
        """Returns a free slot, or None."""
        with self._lock:
            free = self._free_slots()
            if not free:
                return None
            with self._budget.leasing(self.slot_bytes, self.purpose):
                index = next(reversed(free))  # touched last: untouched memory stays untouched
                slot, its_bytes = self._lease_of(index)
                on_death = functools.partial(_take_back, weakref.ref(self), index)
                self._leased[index] = weakref.ref(its_bytes, on_death)
                free.pop(index, None)
            return slot

    def release(self, slot: Slot[R]) -> None:
        """Gives `slot` back; its bytes may be overwritten from now on."""
        its_bytes = _bytes_of(slot)
        with self._lock:
            leased = self._leased.get(slot.index)
            if leased is not None and leased() is its_bytes:
                self._end(slot.index)

    @contextlib.contextmanager
    def releasing(self, slot: Slot[R]) -> Iterator[None]:
        """Releases `slot` at the end of a context that waits for all transfers of its own.

        After an interrupt of a wait it is free when these are over.
        """
        try:
            yield
        except Exception:
            self.release(slot)
            raise
        self.release(slot)

    def _lease_of(self, index: int) -> tuple[Slot[R], Any]:
        region = self._regions[index]
        if isinstance(region, memoryview):
            region = cast(R, np.frombuffer(region, dtype=np.uint8).data)
        slot = Slot(index=index, memory=region)
        return slot, _bytes_of(slot)

    def _free_slots(self) -> dict[int, None]:
        """Returns the free slots; what an interrupt left half done is ended first."""
        if not self._free:
            for index, leased in list(self._leased.items()):
                if leased() is None:
                    self._end(index)
        if len(self._free) + len(self._leased) != self.num_slots:
            self._free = dict.fromkeys(i for i in range(self.num_slots) if i not in self._leased)
        return self._free

    def _end(self, index: int) -> None:
        self._leased.pop(index, None)
        self._free[index] = None


def _bytes_of(slot: Slot[Any]) -> Any:
    """Returns what whatever uses the slot refers to."""
    return slot.memory.obj if isinstance(slot.memory, memoryview) else slot


def _take_back(pool: "weakref.ref[SlotPool[Any]]", index: int, leased: "weakref.ref[Any]") -> None:
    """Ends a lease whose bytes are gone, unless it was released."""
    found = pool()
    if found is not None:
        with found._lock:
            if found._leased.get(index) is leased:
                found._end(index)
