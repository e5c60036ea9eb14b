"""Moves parameters to the tier where they will live: from a built model, or a resumed store."""

from collections.abc import Mapping

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout import FlatShard, PlacedParameter, Record, Unit
from offload.memory import SlotPool, memory_of, storage_over
from offload.optim.pipeline import ModelState, parameter_key, state_key
from offload.streaming.building import Building
from offload.streaming.tier import StoredUnits
from offload.streaming.unit import StreamedUnit


class Adoption:
    """Takes over a model's parameters, unit by unit, freeing each as it goes."""

    def __init__(
        self,
        state: ModelState,
        parameters: Mapping[str, nn.Parameter],
        *,
        building: Building | None,
        is_resumed: bool,
    ) -> None:
        self._state = state
        self._parameters = parameters
        self._building = building
        self._is_resumed = is_resumed

    def make_resident(self) -> None:
        """Copies every parameter into the resident flat shards, or reads them from the store."""
        assert self._state.parameters is not None
        elsewhere = self._state.elsewhere
        for shard in self._state.layout.shards.values():
            flat = self._state.parameters[shard.name]
            if self._is_resumed:
                self._read_shard(shard, flat)
            else:
                keys = map(parameter_key, self._state.layout.subgroups[shard.name])
                self._state.dirty.update(keys)
            for placed in shard.parameters:
                parameter = self._parameters[placed.facts.name]
                view = flat[placed.start : placed.stop].view(placed.facts.shape)
                if not self._is_resumed:
                    view.copy_(self._values_of(parameter))
                self._forget(parameter)
                self._show(shard, placed)
        if elsewhere is not None:
            elsewhere.send_all()
            elsewhere.wait_all()

    def _show(self, shard: FlatShard, placed: PlacedParameter) -> None:
        """Points a resident parameter to its place, which a replaced `parameter.data` is not."""
        elsewhere = self._state.elsewhere
        shown = self._state.parameters if elsewhere is None else elsewhere.flat
        assert shown is not None
        own = shown[shard.name][placed.start : placed.stop]
        self._parameters[placed.facts.name].data = own.view(placed.facts.shape)

    def fill_records(self) -> None:
        """Reads the resident records that the resumed store has; all others begin."""
        records, store = self._state.records, self._state.store
        if records is None:
            return
        for record in self._state.layout.records:
            if self._is_resumed and store is not None and state_key(record) in store:
                memory = memory_of(records[record.name])
                store.read(state_key(record), memory).wait()
            else:
                self._begin(record)

    def _begin(self, record: Record) -> None:
        """State that was never updated is zero, and its fp32 master is the parameter."""
        assert self._state.records is not None
        if self._is_resumed:  # new memory is zero
            self._state.records[record.name].zero_()
        for subgroup in record.subgroups:
            if "master" in record.sections_of(subgroup):
                placed = self._state.layout.parameters_in(subgroup)
                self._state.edited.update(each.facts.name for each in placed)

    def read_parameters(self, *, are_streamed: bool) -> None:
        """Reads every resident flat shard from the store, in place.

        Args:
            are_streamed: Whether parameters are placeholders, which come into slots; else they show
                what is read, whatever they showed.
        """
        assert self._state.parameters is not None
        elsewhere = self._state.elsewhere
        if elsewhere is not None:
            elsewhere.begin()
        for shard in self._state.layout.shards.values():
            self._read_shard(shard, self._state.parameters[shard.name])
            for placed in () if are_streamed else shard.parameters:
                self._show(shard, placed)
        if elsewhere is not None:
            elsewhere.send_all()
            elsewhere.wait_all()

    def make_stored(self, slots: SlotPool[memoryview]) -> None:
        """Writes every unit to the store through a slot; parameters become placeholders."""
        if self._building is not None:
            self._building.leave_room(slots.slot_bytes)
        for index, unit in enumerate(self._state.layout.units):
            streamed = StreamedUnit(unit, index, self._parameters)
            if not self._is_resumed and unit.num_bytes > slots.slot_bytes:
                self._write_by_subgroups(unit, slots)
            elif not self._is_resumed and unit.num_bytes:
                self._write_unit(unit, streamed, slots)
            for binding in streamed.bindings:
                self._forget(binding.parameter)
                binding.detach()

    def _write_unit(self, unit: Unit, streamed: StreamedUnit, slots: SlotPool[memoryview]) -> None:
        assert self._state.store is not None
        slot = slots.try_lease()
        assert slot is not None, "no unit is resident yet: every slot is free"
        with slots.releasing(slot):
            base = storage_over(slot.memory[: unit.num_bytes])
            base.zero_()  # gaps between parameters are stored as zero
            for binding in streamed.bindings:
                values = self._values_of(binding.parameter)
                stop = binding.offset_bytes + binding.num_bytes
                target = base[binding.offset_bytes : stop].view(values.dtype)
                target.view(values.shape).copy_(values)
            StoredUnits(self._state.layout, self._state.store).write_from(
                unit, slot.memory[: unit.num_bytes]
            )

    def _write_by_subgroups(self, unit: Unit, slots: SlotPool[memoryview]) -> None:
        """Writes a unit of one parameter, which no slot holds."""
        assert self._state.store is not None
        shard = unit.shards[0]
        values = self._values_of(self._parameters[shard.parameters[0].facts.name])
        flat = values.contiguous().view(-1)
        slot = slots.try_lease()
        assert slot is not None, "no unit is resident yet: every slot is free"
        with slots.releasing(slot):
            for subgroup in self._state.layout.subgroups[shard.name]:
                memory = slot.memory[: subgroup.padded_parameter_bytes]
                base = storage_over(memory)
                base.zero_()
                base.view(flat.dtype)[: subgroup.stop - subgroup.start].copy_(
                    flat[subgroup.start : subgroup.stop]
                )
                self._state.store.write(
                    parameter_key(subgroup), memory, num_bytes=subgroup.parameter_bytes
                ).wait()

    def _read_shard(self, shard: FlatShard, flat: torch.Tensor) -> None:
        assert self._state.store is not None
        memory = memory_of(flat)
        for subgroup in self._state.layout.subgroups[shard.name]:
            start = subgroup.offset_bytes
            into = memory[start : start + subgroup.padded_parameter_bytes]
            self._state.store.read(parameter_key(subgroup), into).wait()

    def _values_of(self, parameter: nn.Parameter) -> torch.Tensor:
        if self._building is not None:
            self._building.touch(parameter)
        if parameter.is_meta:
            raise ConfigError(
                "cannot wrap a parameter on the `meta` device: expected values, found none; "
                "build the model on the CPU, inside `session.building()` if it is large"
            )
        return parameter.data

    def _forget(self, parameter: nn.Parameter) -> None:
        if self._building is not None:
            self._building.forget(parameter)
