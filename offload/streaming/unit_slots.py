"""The slots in which units lie, and who leaves one when it is needed."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from offload.devices import Device
from offload.memory import Region, Slot, SlotPool
from offload.streaming.unit import CopyState, StreamedUnit

_NOW = -1


class UnitSlots:
    """Gives slots as tensors over them; a slot comes back when its tensor is dead.

    Concurrency: The thread that runs the model; slots may come back from any thread.
    """

    def __init__(
        self,
        units: Sequence[StreamedUnit],
        *,
        pool: SlotPool[Any],
        device: Device,
        next_use: Callable[[int], int],
        evict: Callable[[StreamedUnit], None],
    ) -> None:
        """Stores its arguments.

        Args:
            units: Which may be in slots.
            pool: The slots.
            device: Whose memory they are.
            next_use: Gives the place of a unit's next use, from 0.
            evict: Takes a unit out of its slot.
        """
        self._units = units
        self._pool = pool
        self._device = device
        self._next_use = next_use
        self._evict = evict

    def try_take_free(self, num_bytes: int) -> torch.Tensor | None:
        """Returns `num_bytes` in a slot that is free; None where none is."""
        slot = self._pool.try_lease()
        return None if slot is None else self._over(slot, num_bytes)

    def try_take(
        self, num_bytes: int, *, needed_at: int = _NOW, keep: Container[int] = ()
    ) -> torch.Tensor | None:
        """Returns `num_bytes`, evicting units not in `keep` that are used after `needed_at`."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device.torch_device)
        slot = self._pool.try_lease()
        while slot is None:
            victim = self._farthest_next_use(keep)
            if victim is None or self._next_use(victim.index) <= needed_at:
                return None
            self._evict(victim)
            slot = self._pool.try_lease()
        return self._over(slot, num_bytes)

    def _over(self, slot: Slot[Any], num_bytes: int) -> torch.Tensor:
        pool = self._pool
        memory: Region = slot.memory[:num_bytes]
        return self._device.tensor_over(memory, on_death=lambda: pool.release(slot))

    def _farthest_next_use(self, keep: Container[int]) -> StreamedUnit | None:
        candidates = [
            unit
            for unit in self._units
            if unit.num_holds == 0
            and not unit.is_wide
            and unit.index not in keep
            and not unit.kept_names
            and unit.base is not None
            and unit.base.numel()
            and unit.state is not CopyState.ABSENT
        ]
        return max(candidates, key=lambda u: self._next_use(u.index), default=None)
