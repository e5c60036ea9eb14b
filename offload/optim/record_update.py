"""The computing part of an update: the operands of a record's subgroups, and the pass over them."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from offload.layout import WHOLE_RULE, Record, Subgroup
from offload.memory import storage_over
from offload.optim.kernels import Kernels, Operands, PreparedUpdate, Range
from offload.optim.model_state import ModelState, ParameterUpdate, parameter_key, state_key
from offload.optim.whole import update_whole
from offload.optim.window import RecordBuffer, parameter_view


class RecordUpdate:
    """Updates one record that is in memory.

    Concurrency: One thread at a time; the pass runs on the kernels' own threads.
    """

    def __init__(self, state: ModelState, kernels: Kernels) -> None:
        self._state = state
        self._kernels = kernels
        # Of subgroups that stay in memory with all that belongs to them, by name.
        self._resident: dict[str, _Prepared] = {}

    def run(
        self,
        record: Record,
        buffer: RecordBuffer | None,
        updates: Mapping[str, ParameterUpdate],
        *,
        edited: Collection[str],
        is_new: bool,
    ) -> None:
        """Updates the record in place.

        Args:
            record: What is updated.
            buffer: What of it does not stay in memory; None where all of it does.
            updates: By parameter name; a parameter that has none is left as it is.
            edited: Parameters that are the master again.
            is_new: Its state was never written: a whole master starts as the parameter.
        """
        for subgroup in record.subgroups:
            prepared = self._prepared(record, buffer, subgroup)
            if is_new or edited:
                self._honour_edits(subgroup, prepared.operands, edited=edited, is_new=is_new)
            if prepared.update is None:
                self._update_whole(subgroup, prepared.operands, updates)
            else:
                for scales, ranges in _ranges(prepared.places, updates):
                    prepared.update(ranges, gradient_scales=scales)
            self._note_seen(subgroup, updates)
        if self._state.records is not None:
            self._state.dirty.add(state_key(record))
        if self._state.parameters is not None:
            self._state.dirty.update(parameter_key(s) for s in record.subgroups)
        if self._state.elsewhere is not None:
            for subgroup in record.subgroups:
                for start, stop in self._changed(subgroup, updates):
                    self._state.elsewhere.send(subgroup.shard, start, stop)

    def _note_seen(self, subgroup: Subgroup, updates: Collection[str]) -> None:
        if self._state.seen is not None:
            names = (p.facts.name for p in self._state.layout.parameters_in(subgroup))
            self._state.seen.note_updated(subgroup.name, [n for n in names if n in updates])

    def _changed(self, subgroup: Subgroup, updates: Collection[str]) -> Iterator[tuple[int, int]]:
        """Yields the elements of the shard that were updated, neighbours together."""
        placed = self._state.layout.parameters_in(subgroup)
        groups = itertools.groupby(placed, key=lambda each: each.facts.name in updates)
        for is_updated, group in groups:
            if is_updated:
                together = list(group)
                start, stop = together[0].start, together[-1].stop
                yield max(start, subgroup.start), min(stop, subgroup.stop)

    def _update_whole(
        self, subgroup: Subgroup, operands: Operands, updates: Mapping[str, ParameterUpdate]
    ) -> None:
        (placed,) = self._state.layout.parameters_in(subgroup)
        update = updates.get(placed.facts.name)
        if update is not None:
            assert update.whole is not None
            shape = placed.facts.shape
            update_whole(operands, shape, update.whole, gradient_scales=update.scales)

    def _prepared(
        self, record: Record, buffer: RecordBuffer | None, subgroup: Subgroup
    ) -> "_Prepared":
        if buffer is not None:
            return self._prepare(record, buffer, subgroup)
        prepared = self._resident.get(subgroup.name)
        if prepared is None:
            prepared = self._resident[subgroup.name] = self._prepare(record, None, subgroup)
        return prepared

    def _prepare(
        self, record: Record, buffer: RecordBuffer | None, subgroup: Subgroup
    ) -> "_Prepared":
        operands = self._operands(record, buffer, subgroup)
        return _Prepared(
            operands=operands,
            update=None if subgroup.is_whole else self._kernels.prepare(operands),
            places=tuple(
                (
                    placed.facts.name,
                    max(placed.start, subgroup.start) - subgroup.start,
                    min(placed.stop, subgroup.stop) - subgroup.start,
                )
                for placed in self._state.layout.parameters_in(subgroup)
            ),
        )

    def _operands(
        self, record: Record, buffer: RecordBuffer | None, subgroup: Subgroup
    ) -> Operands:
        state = self._state
        shard = state.layout.shards[subgroup.shard]
        if state.parameters is not None:
            parameter = state.parameters[subgroup.shard][subgroup.start : subgroup.stop]
        else:
            assert buffer is not None
            dtype = getattr(torch, shard.dtype)
            parameter = parameter_view(buffer.parameters[subgroup.name], subgroup, dtype)
        if state.records is not None:
            base = state.records[record.name]
        elif buffer is not None and buffer.state is not None:
            base = storage_over(buffer.state)
        else:  # the rule keeps no state
            base = torch.empty(0, dtype=torch.uint8, device="cpu")
        sections = {
            name: base[s.offset_bytes : s.offset_bytes + s.num_bytes].view(getattr(torch, s.dtype))
            for name, s in record.sections_of(subgroup).items()
        }
        return Operands(
            rule=WHOLE_RULE if subgroup.is_whole else state.layout.rule,
            parameter=parameter,
            gradient=self._gradient(buffer, subgroup),
            master_low=sections.pop("master_low", None),
            master=sections.pop("master", None),
            state=sections,
        )

    def _gradient(self, buffer: RecordBuffer | None, subgroup: Subgroup) -> torch.Tensor:
        flat = self._state.gradients.get(subgroup.shard)
        if flat is not None:
            return flat[subgroup.start : subgroup.stop]
        assert buffer is not None
        memory = storage_over(buffer.gradients[subgroup.name])
        dtype = torch.float32 if self._state.has_fp32_gradients else None
        shard = self._state.layout.shards[subgroup.shard]
        return memory.view(dtype or getattr(torch, shard.dtype))[: subgroup.num_elements]

    def _honour_edits(
        self, subgroup: Subgroup, operands: Operands, *, edited: Collection[str], is_new: bool
    ) -> None:
        """Makes the master equal to the parameter where there is none yet or the user edited it."""
        for placed in self._state.layout.parameters_in(subgroup):
            if not is_new and placed.facts.name not in edited:
                continue
            start = max(placed.start, subgroup.start) - subgroup.start
            stop = min(placed.stop, subgroup.stop) - subgroup.start
            if operands.master_low is not None:
                operands.master_low[start:stop] = 0
            if operands.master is not None:
                operands.master[start:stop] = operands.parameter[start:stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What an update of a subgroup works on.

    Attributes:
        operands: Its memory.
        update: The kernel over it; None for a whole matrix.
        places: Each parameter's name, and its elements in the subgroup, from and to.
    """

    operands: Operands
    update: PreparedUpdate | None
    places: tuple[tuple[str, int, int], ...]


def _ranges(
    places: Iterable[tuple[str, int, int]], updates: Mapping[str, ParameterUpdate]
) -> list[tuple[tuple[float, ...], list[Range]]]:
    """Returns the factors pending on gradients, each time with the ranges that are under them."""
    ranges: dict[str, tuple[tuple[float, ...], list[Range]]] = {}
    for name, start, stop in places:
        update = updates.get(name)
        if update is not None and stop > start:
            part = Range(start=start, stop=stop, scalars=update.scalars)
            # Zeros of both signs are equal, and not the same factor.
            together = repr(update.scales) if update.scales else ""
            ranges.setdefault(together, (update.scales, []))[1].append(part)
    return list(ranges.values())
