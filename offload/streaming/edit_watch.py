"""Edits through `parameter.data` of units in slots: they move no version counter."""

from collections.abc import Sequence
from typing import Protocol

import torch

from offload.devices import Device
from offload.errors import StoreError
from offload.plan.device import sum_columns
from offload.streaming.byte_sums import ByteSums
from offload.streaming.unit import StreamedUnit


class Watch(Protocol):
    """Looks at what comes into slots and what leaves them.

    Concurrency: The thread that runs the model, and autograd's.
    """

    def begin(self, unit: StreamedUnit) -> None:
        """Takes the bytes of now as those that should stay."""
        ...

    def end(self, unit: StreamedUnit) -> None:
        """Looks whether they stayed."""
        ...

    def raise_changed(self, units: Sequence[StreamedUnit]) -> None:
        """Raises StoreError once if the bytes of a unit did not stay, and are lost."""
        ...


def make_watch(num_units: int, device: Device, *, slot_bytes: int) -> Watch:
    """Returns how the slots of a device are watched."""
    if device.is_unified:
        return NoWatch()
    return DeviceWatch(num_units, device, slot_bytes=slot_bytes)


class NoWatch:
    """For host memory, where units hash what comes into their slots themselves."""

    def begin(self, unit: StreamedUnit) -> None:
        del unit

    def end(self, unit: StreamedUnit) -> None:
        del unit

    def raise_changed(self, units: Sequence[StreamedUnit]) -> None:
        del units


class DeviceWatch:
    """Finds that the bytes of a slot changed where no version counter and no hash shows it.

    [Note: edits inside calls on a device]
    Hashing a slot in host memory would wait for all that the device computes, at every eviction. So
    the device itself sums what has come into a slot, and again before it leaves: four reads of its
    memory, at the rate of that, where the link took one. What they say is read where the engine
    waits for the device anyway: at the next step, commit or evaluation. By then the bytes are gone:
    such an edit is refused, and nothing is updated. One beside an edit of the same unit that a
    counter shows, while it is in the same slot, is not found: the sums begin anew. Wide units are
    in no slot of the device; they were looked at, so their bytes are hashed.
    """

    def __init__(self, num_units: int, device: Device, *, slot_bytes: int) -> None:
        """Takes memory for sums beside the budget: 0.3 % of 100 MB, less of a larger slot.

        Args:
            num_units: Of the model.
            device: Where the slots are.
            slot_bytes: Of a slot.
        """
        self._device = device
        self._numbers: set[int] = set()  # of units in slots
        with torch.inference_mode(mode=False):
            where = device.torch_device
            self._byte_sums = ByteSums(sum_columns(slot_bytes), where)
            # By the number of a unit: as it came into its slot.
            self._sums = torch.zeros(num_units, dtype=torch.int64, device=where)
            self._found = torch.zeros((), dtype=torch.int64, device=where)
            self._changed = torch.zeros(num_units, dtype=torch.bool, device=where)
        # What orders the last work that used these.
        self._stream = device.follow(None)

    def begin(self, unit: StreamedUnit) -> None:
        if unit.is_wide:
            return
        assert unit.base is not None
        self._follow()
        self._numbers.add(unit.index)
        self._byte_sums.sum_into(unit.base, self._sums[unit.index])

    def end(self, unit: StreamedUnit) -> None:
        if unit.index in self._numbers:
            assert unit.base is not None
            self._follow()
            self._numbers.remove(unit.index)
            self._byte_sums.sum_into(unit.base, self._found)
            self._changed[unit.index].logical_or_(self._found != self._sums[unit.index])

    def _follow(self) -> None:
        """Orders what comes after what was summed before, in whatever stream."""
        self._stream = self._device.follow(self._stream)

    def raise_changed(self, units: Sequence[StreamedUnit]) -> None:
        self._follow()
        changed = self._changed.tolist()
        if not any(changed):
            return
        self._changed.zero_()
        name = next(u.name for u, was_changed in zip(units, changed, strict=True) if was_changed)
        raise StoreError(
            f"cannot go on: expected the parameters of `{name}` as they were fetched, found that "
            "`parameter.data` of one was written to while it was in its slot on the device, and "
            "the edit is lost; edit it as `module.weight.copy_(values)` under `torch.no_grad()`, "
            "or outside the model's call"
        )
