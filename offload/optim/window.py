"""The window: buffers that hold what of a record lives on storage while it is updated."""

from dataclasses import dataclass

import torch

from offload.layout import ModelLayout, Record, Subgroup
from offload.memory import Slot, SlotPool, storage_over


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBuffer:
    """One record in the window.

    Attributes:
        state_slot: Its first bytes are the record's state, padded; None where that is resident.
        state: The state in it; None where that is resident or the rule keeps none.
        parameter_slot: Holds what `parameters` show; None where parameters are resident.
        parameters: Bytes of each subgroup's parameters, padded; empty where they are resident.
    """

    state_slot: Slot[memoryview] | None
    parameter_slot: Slot[memoryview] | None
    state: memoryview | None
    parameters: dict[str, memoryview]


class Window:
    """Record buffers, and a cache of states that stay in memory between steps.

    Attributes:
        cached: The slot of each record that is in memory, by name.
    """

    def __init__(
        self,
        layout: ModelLayout,
        *,
        states: SlotPool[memoryview] | None,
        parameters: SlotPool[memoryview] | None,
        num_cached: int,
    ) -> None:
        """Stores its arguments.

        Args:
            layout: Of the model.
            states: Slots for records; None where the state is resident.
            parameters: Slots for a record's parameters; None where they are resident.
            num_cached: The most records that `keep` may hold.
        """
        self._layout = layout
        self._states = states
        self._parameters = parameters
        self.num_cached = num_cached
        self.cached: dict[str, Slot[memoryview]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether everything is resident, so that records need no buffer."""
        return self._states is None and self._parameters is None

    @property
    def num_free(self) -> int:
        """Records that could be leased now, those that are cached left aside."""
        pools = [pool for pool in (self._states, self._parameters) if pool is not None]
        return min((pool.num_free for pool in pools), default=0)

    def cached_state(self, record: Record) -> memoryview | None:
        """Returns the state of a cached record, padded, or None."""
        slot = self.cached.get(record.name)
        return slot.memory[: record.padded_bytes] if slot is not None else None

    def try_lease(self, record: Record) -> RecordBuffer | None:
        """Returns a buffer for `record`, with its state in it if that is cached.

        None while all buffers are in use.
        """
        parameter_slot = self._parameters.try_lease() if self._parameters else None
        if self._parameters and parameter_slot is None:
            return None
        state_slot = self.cached.pop(record.name, None)
        if state_slot is None and self._states:
            state_slot = self._states.try_lease()
            if state_slot is None:
                if self._parameters and parameter_slot is not None:
                    self._parameters.release(parameter_slot)
                return None
        return RecordBuffer(
            state_slot=state_slot,
            parameter_slot=parameter_slot,
            state=state_slot.memory[: record.padded_bytes]
            if state_slot and record.num_bytes
            else None,
            parameters=_cut(record, parameter_slot) if parameter_slot else {},
        )

    def keep(self, record: Record, buffer: RecordBuffer) -> RecordBuffer:
        """Moves the state of `buffer` to the cache; returns the buffer without it."""
        assert buffer.state_slot is not None
        self.cached[record.name] = buffer.state_slot
        return RecordBuffer(
            state_slot=None,
            parameter_slot=buffer.parameter_slot,
            state=None,
            parameters=buffer.parameters,
        )

    def drop_cached(self) -> None:
        """Gives the slots of all cached states back; what was not written is lost."""
        for slot in self.cached.values():
            assert self._states is not None
            self._states.release(slot)
        self.cached.clear()

    def release(self, buffer: RecordBuffer) -> None:
        """Gives the buffer back; its transfers must have ended."""
        if self._states and buffer.state_slot is not None:
            self._states.release(buffer.state_slot)
        if self._parameters and buffer.parameter_slot is not None:
            self._parameters.release(buffer.parameter_slot)


def parameter_view(memory: memoryview, subgroup: Subgroup, dtype: torch.dtype) -> torch.Tensor:
    """Returns the `(num_elements,)` parameters of `subgroup` in its part of a buffer."""
    return storage_over(memory[: subgroup.parameter_bytes]).view(dtype)


def _cut(record: Record, slot: Slot[memoryview]) -> dict[str, memoryview]:
    parameters: dict[str, memoryview] = {}
    offset = 0
    for subgroup in record.subgroups:
        stop = offset + subgroup.padded_parameter_bytes
        parameters[subgroup.name] = slot.memory[offset:stop]
        offset = stop
    return parameters
