"""The window: buffers that hold what of a record lives on storage while it is updated."""

import weakref
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

import torch

from offload.layout import ModelLayout, Record, Subgroup
from offload.memory import Slot, SlotPool, storage_over
from offload.plan.window import is_left_for_reads


class Place:
    """Room for one record in a window; taken as long as something refers to it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBuffer:
    """One record in the window.

    Attributes:
        place: Of the record.
        state_slot: Its first bytes are the record's state, padded; None where that is resident.
        state: The state in it; None where that is resident or the rule keeps none.
        parameter_slot: Holds what `parameters` show; None where parameters are resident.
        parameters: Bytes of each subgroup's parameters, padded; empty where they are resident.
        gradient_slot: Holds what `gradients` show; None where all gradients are in memory.
        gradients: Bytes of the gradients of each subgroup whose gradients are spilled, padded.
    """

    place: Place
    state_slot: Slot[memoryview] | None
    parameter_slot: Slot[memoryview] | None
    state: memoryview | None
    parameters: dict[str, memoryview]
    gradient_slot: Slot[memoryview] | None = None
    gradients: dict[str, memoryview] = field(default_factory=dict)


class Window:
    """Record buffers, and a cache of states that stay in memory between steps.

    Attributes:
        cached: The slot of each record that is in memory, by name.
        num_places: The most records that are in the window at one time.

    See [Note: a lease ends with its bytes] in `offload.memory.pool`: a buffer that an interrupt
    made lost takes no place, and its slots come back.
    """

    def __init__(
        self,
        layout: ModelLayout,
        *,
        states: SlotPool[memoryview] | None,
        parameters: SlotPool[memoryview] | None,
        num_cached: int,
        num_places: int,
        gradients: SlotPool[memoryview] | None = None,
        gradient_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """Stores its arguments.

        Args:
            layout: Of the model.
            states: Slots for records; None where the state is resident.
            parameters: Slots for a record's parameters; None where they are resident.
            num_cached: The most records that `keep` may hold.
            num_places: The most records in the window at one time. One that is cached brings its
                state along; any other needs one of `states`.
            gradients: Slots for a record's spilled gradients; None where there are none.
            gradient_bytes: Of each subgroup whose gradients are spilled, padded, by name.
        """
        self._layout = layout
        self._states = states
        self._parameters = parameters
        self._gradients = gradients
        self._gradient_bytes = gradient_bytes or {}
        self.num_cached = num_cached
        self.num_places = num_places
        self._places = weakref.WeakSet[Place]()
        self.cached: dict[str, Slot[memoryview]] = {}

    @property
    def num_places_taken(self) -> int:
        """Records that are in the window now."""
        return len(self._places)

    @property
    def is_empty(self) -> bool:
        """Whether everything is resident, so that records need no buffer."""
        return not self._pools

    @property
    def num_free(self) -> int:
        """Records that could be leased now, those that are cached left aside."""
        pools = (pool.num_free for pool in self._pools)
        return min(self.num_places - self.num_places_taken, *pools) if self._pools else 0

    def records_that_wait(self) -> Container[str]:
        """Returns the names of records that had better wait for those that have to be read now.

        These are the ones in memory, once the places that are left are for reads.
        """
        num_free = self.num_places - self.num_places_taken
        num_buffers_free = self._states.num_free if self._states else 0
        is_left = is_left_for_reads(num_free, self.num_places, num_buffers_free)
        return self.cached if is_left else ()

    @property
    def _pools(self) -> list[SlotPool[memoryview]]:
        pools = (self._states, self._parameters, self._gradients)
        return [pool for pool in pools if pool is not None]

    def cached_state(self, record: Record) -> memoryview | None:
        """Returns the state of a cached record, padded, or None."""
        slot = self.cached.get(record.name)
        return slot.memory[: record.padded_bytes] if slot is not None else None

    def try_lease(self, record: Record) -> RecordBuffer | None:
        """Returns a buffer for `record`, with its state in it if that is cached.

        None while all buffers are in use.
        """
        takes_state = self._states is not None and record.name not in self.cached
        takes_gradients = any(s.name in self._gradient_bytes for s in record.subgroups)
        wanted = (
            (self._states, takes_state),
            (self._parameters, True),
            (self._gradients, takes_gradients),
        )
        needed = [pool for pool, is_taken in wanted if pool is not None and is_taken]
        if self.num_places_taken >= self.num_places or any(not p.num_free for p in needed):
            return None
        place = self._take_place()
        parameter_slot = self._parameters.try_lease() if self._parameters else None
        gradient_slot = None
        if self._gradients and takes_gradients:
            gradient_slot = self._gradients.try_lease()
        state_slot = self.cached.pop(record.name, None)
        if state_slot is None and self._states:
            state_slot = self._states.try_lease()
        return RecordBuffer(
            place=place,
            state_slot=state_slot,
            parameter_slot=parameter_slot,
            state=state_slot.memory[: record.padded_bytes]
            if state_slot and record.num_bytes
            else None,
            parameters=_cut(record, parameter_slot) if parameter_slot else {},
            gradient_slot=gradient_slot,
            gradients=self._cut_gradients(record, gradient_slot) if gradient_slot else {},
        )

    def try_take_cached(self, record: Record) -> RecordBuffer | None:
        """Takes a state that is cached out of the cache; None while all places are taken."""
        if self.num_places_taken >= self.num_places:
            return None
        place = self._take_place()
        state, slot = self.cached_state(record), self.cached.pop(record.name)
        return RecordBuffer(
            place=place, state_slot=slot, parameter_slot=None, state=state, parameters={}
        )

    def keep(self, record: Record, buffer: RecordBuffer) -> RecordBuffer:
        """Moves the state of `buffer` to the cache; returns the buffer without it."""
        assert buffer.state_slot is not None
        self.cached[record.name] = buffer.state_slot
        return replace(buffer, state_slot=None, state=None)

    def drop_cached(self) -> None:
        """Gives the slots of all cached states back; what was not written is lost."""
        for slot in self.cached.values():
            assert self._states is not None
            self._states.release(slot)
        self.cached.clear()

    def release(self, buffer: RecordBuffer) -> None:
        """Gives the buffer back; its transfers must have ended."""
        self._places.discard(buffer.place)
        if self._states and buffer.state_slot is not None:
            self._states.release(buffer.state_slot)
        if self._parameters and buffer.parameter_slot is not None:
            self._parameters.release(buffer.parameter_slot)
        if self._gradients and buffer.gradient_slot is not None:
            self._gradients.release(buffer.gradient_slot)

    def _take_place(self) -> Place:
        place = Place()
        self._places.add(place)
        return place

    def _cut_gradients(self, record: Record, slot: Slot[memoryview]) -> dict[str, memoryview]:
        gradients: dict[str, memoryview] = {}
        offset = 0
        for subgroup in record.subgroups:
            stop = offset + self._gradient_bytes.get(subgroup.name, 0)
            if stop > offset:
                gradients[subgroup.name] = slot.memory[offset:stop]
            offset = stop
        return gradients


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
