"""The window: buffers that hold what of a record lives on storage while it is updated."""

from dataclasses import dataclass

import torch

from offload.layout import ModelLayout, Record, Subgroup
from offload.memory import Slot, SlotPool, storage_over


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBuffer:
    """One record in the window.

    Attributes:
        state: Bytes of the record, padded; None where the state is resident.
        parameters: Bytes of each subgroup's parameters, padded; empty where they are resident.
    """

    slot: Slot
    state: memoryview | None
    parameters: dict[str, memoryview]


class Window:
    """Record buffers cut from one pool."""

    def __init__(
        self,
        pool: SlotPool | None,
        layout: ModelLayout,
        *,
        holds_state: bool,
        holds_parameters: bool,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._holds_state = holds_state
        self._holds_parameters = holds_parameters

    @property
    def num_buffers(self) -> int:
        return self._pool.num_slots if self._pool else 0

    def try_lease(self, record: Record) -> RecordBuffer | None:
        """Returns a buffer for `record`, or None while all are in use."""
        assert self._pool is not None
        slot = self._pool.try_lease()
        if slot is None:
            return None
        offset = 0
        state: memoryview | None = None
        if self._holds_state:
            state = slot.memory[: record.padded_bytes]
            offset = record.padded_bytes
        parameters: dict[str, memoryview] = {}
        if self._holds_parameters:
            for subgroup in record.subgroups:
                stop = offset + subgroup.padded_parameter_bytes
                parameters[subgroup.name] = slot.memory[offset:stop]
                offset = stop
        return RecordBuffer(slot=slot, state=state, parameters=parameters)

    def release(self, buffer: RecordBuffer) -> None:
        """Gives the buffer back; its transfers must have ended."""
        assert self._pool is not None
        self._pool.release(buffer.slot)


def parameter_view(memory: memoryview, subgroup: Subgroup, dtype: torch.dtype) -> torch.Tensor:
    """Returns the `(num_elements,)` parameters of `subgroup` in its part of a buffer."""
    return storage_over(memory[: subgroup.parameter_bytes]).view(dtype)
