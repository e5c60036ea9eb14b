"""Reads parts of wide units, which no slot holds whole."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload.devices import Device
from offload.errors import BudgetError
from offload.memory import Arena, storage_over
from offload.sizes import format_size
from offload.streaming.parameter_tier import ParameterTier
from offload.streaming.unit import StreamedUnit, Transfer, wait_quietly
from offload.streaming.unit_slots import UnitSlots

logger = logging.getLogger("offload.streaming")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """A part of a wide unit on its way into a slot, which `memory` owns."""

    unit: StreamedUnit
    part: range
    memory: torch.Tensor
    transfers: list[Transfer]


class PartReads:
    """Reads parts into slots; a part is a range of a unit's bytes, no longer than a slot.

    Concurrency: The thread that runs the model, and autograd's.
    """

    def __init__(
        self,
        tier: ParameterTier,
        device: Device,
        *,
        slots: UnitSlots,
        take_slot: Callable[[StreamedUnit, int], torch.Tensor],
        wait: Callable[[Sequence[Transfer], str], None],
    ) -> None:
        """Stores its arguments.

        Args:
            tier: Where the units are.
            device: Where they are used.
            slots: Gives those that are free.
            take_slot: Gives bytes for a unit, evicting others; raises BudgetError.
            wait: Waits for transfers, and counts it for a cause.
        """
        self._tier = tier
        self._device = device
        self._slots = slots
        self._take_slot = take_slot
        self._wait = wait

    @property
    def granule_bytes(self) -> int:
        """The smallest part of a subgroup that can be read."""
        return self._tier.granule_bytes

    def start(self, unit: StreamedUnit, part: range) -> PartRead:
        """Starts reading a part.

        Raises:
            BudgetError: Every slot is held or reached by a tensor.
        """
        memory = self._take_slot(unit, len(part))
        transfers = self._tier.start_read(unit.layout, memory, is_prefetch=False, part=part)
        return PartRead(unit=unit, part=part, memory=memory, transfers=transfers)

    def try_start(self, unit: StreamedUnit, part: range) -> PartRead | None:
        """As `start`, ahead of use; None where no slot is free."""
        memory = self._slots.try_take_free(len(part)) if self._tier.can_prefetch() else None
        if memory is None:
            return None
        transfers = self._tier.start_read(unit.layout, memory, is_prefetch=True, part=part)
        return PartRead(unit=unit, part=part, memory=memory, transfers=transfers)

    def finish(self, read: PartRead) -> torch.Tensor:
        """Waits for a part and returns its bytes; their slot is free when no tensor has it."""
        try:
            self._wait(read.transfers, "fetching a tile")
        except BaseException:
            wait_quietly(read.transfers)
            raise
        return read.memory

    def drop(self, read: PartRead) -> None:
        """Waits for a part that nobody asks for any more, whatever it gives."""
        wait_quietly(read.transfers)

    def read_whole(self, unit: StreamedUnit) -> torch.Tensor:
        """Returns all bytes of a unit where it is used, in memory which no budget covers.

        Raises:
            BudgetError: The device has not so much memory.
        """
        logger.warning(
            "`%s` is read as a whole because it is looked at outside a pass: %s beside the budget",
            unit.name,
            format_size(unit.layout.num_bytes),
        )
        base = self._take_beside(unit)
        for number, part in enumerate(unit.subgroups):
            if number:  # or it could not be copied to
                self._device.note_uses([base])
            memory = base[part.start : part.stop]
            transfers = self._tier.start_read(unit.layout, memory, is_prefetch=False, part=part)
            self.finish(PartRead(unit=unit, part=part, memory=memory, transfers=transfers))
        return base

    def copy_whole(self, unit: StreamedUnit, into: torch.Tensor) -> None:
        """Copies the bytes of a unit into host memory, through slots: the device has no more.

        Shapes: `into` is uint8, of the unit's bytes without what pads them.
        """
        self._tier.wait_readable(unit.layout)
        for part in unit.subgroups:
            memory, own = self.finish(self.start(unit, part)), into[part.start : part.stop]
            self._device.copy_out(memory[: len(own)], own).synchronize()

    def _take_beside(self, unit: StreamedUnit) -> torch.Tensor:
        num_bytes = unit.layout.num_bytes
        if self._device.is_unified:
            arena = Arena(num_bytes)
            arena.open()
            return storage_over(arena.whole())
        try:
            return self._device.empty(num_bytes)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"cannot look at `{unit.name}` outside a pass: expected {format_size(num_bytes)} "
                f"on device `{self._device.torch_device}` beside the budget for the whole weight, "
                "which no slot holds, found less; lower `tiers.device.memory`, read it by "
                "`model.state_dict()`, or change it before `wrap`"
            ) from error
