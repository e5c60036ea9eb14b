"""The update phase: read a record, one fused pass, write it back, many records in flight."""

import contextlib
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from offload.errors import OffloadError
from offload.layout import ModelLayout, Record, Subgroup
from offload.memory import storage_over
from offload.optim.kernels import AdamWOperands, AdamWRange, AdamWScalars, Kernels
from offload.optim.window import RecordBuffer, Window, parameter_view
from offload.storage.store import BlockStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUpdate:
    """What one parameter's update needs besides its gradient.

    Attributes:
        scales: Factors pending on the gradient, applied in the pass.
    """

    scalars: AdamWScalars
    scales: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class ModelState:
    """Where the parameters and the optimizer state of a model live.

    Attributes:
        store: Holds what is not resident; None where everything is.
        parameters: Resident flat shards by name, or None where parameters live on storage.
        records: Resident records by name, uint8, or None where the state lives on storage.
        gradients: Flat accumulators of the trainable shards by name.
        edited: Parameters that the user changed since their state was last written: their
            master is the parameter itself again.
        dirty: Resident and cached records that differ from the store's.
    """

    layout: ModelLayout
    store: BlockStore | None
    parameters: dict[str, torch.Tensor] | None
    records: dict[str, torch.Tensor] | None
    gradients: dict[str, torch.Tensor]
    edited: set[str] = field(default_factory=set)
    dirty: set[str] = field(default_factory=set)


class Ticket(Protocol):
    def wait(self) -> None: ...
    def done(self) -> bool: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    """A record in the window and the transfers that it waits for."""

    record: Record
    buffer: RecordBuffer | None
    tickets: list[Ticket] = field(default_factory=list)
    is_new: bool = False
    """Its state was never written: it is zero, and a whole master starts as the parameter."""

    def is_done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)


class UpdatePipeline:
    """Updates records in a given order, reading, computing and writing at the same time.

    Ownership: A buffer belongs to its record from the read until its write is done; then it
        takes the next record.
    Concurrency: One thread calls `run`; transfers run in the I/O engine's threads, the pass on
        the kernels' own.
    """

    def __init__(self, state: ModelState, window: Window, kernels: Kernels) -> None:
        self._state = state
        self._window = window
        self._kernels = kernels
        self.io_wait_s = 0.0
        self.cache_hit_bytes = 0

    def run(
        self,
        order: Iterable[Record],
        updates: Mapping[str, ParameterUpdate],
        *,
        kept: Container[str] = (),
    ) -> None:
        """Applies `updates`, by parameter name, record by record.

        A record none of whose parameters is updated or edited is neither read nor written.

        Args:
            order: Every record once.
            updates: What is updated; a record is touched if any parameter of it is.
            kept: Names of records whose state stays in memory after its update, not written.

        Raises:
            StorageError, CorruptStateError: A transfer failed. Records written before keep
                their new version until the next commit or close.
        """
        touched = updates.keys() | self._state.edited
        records = list(order)
        waiting = deque(r for r in records if touched & self._parameters_of(r))
        reading: deque[_InFlight] = deque()
        writing: deque[_InFlight] = deque()
        try:
            self._write_back_left_out(records, {r.name for r in waiting}, kept, writing)
            while waiting or reading or writing:
                self._reap(writing)
                self._read_ahead(waiting, reading, updates)
                if reading:
                    self._wait(reading[0])
                    self._update(reading[0], updates)
                    self._start_write(reading, writing, kept)
                elif writing:
                    self._wait(writing[0])
        except BaseException:
            self._abandon(reading, writing)
            raise
        self._state.edited.clear()

    def _parameters_of(self, record: Record) -> set[str]:
        layout = self._state.layout
        return {p.facts.name for s in record.subgroups for p in layout.parameters_in(s)}

    def _read_ahead(
        self,
        waiting: deque[Record],
        reading: deque[_InFlight],
        updates: Mapping[str, ParameterUpdate],
    ) -> None:
        """Starts reading the next records, as long as there are free buffers."""
        while waiting:
            buffer: RecordBuffer | None = None
            record = waiting[0]
            is_hit = record.name in self._window.cached
            if not self._window.is_empty:
                buffer = self._window.try_lease(record)
                if buffer is None:
                    return
            elif reading:
                return
            is_new = self._is_new(record) and not is_hit
            reading.append(_InFlight(record=waiting.popleft(), buffer=buffer, is_new=is_new))
            self._start_read(reading[-1], updates, is_hit=is_hit)

    def _start_read(
        self, current: _InFlight, updates: Mapping[str, ParameterUpdate], *, is_hit: bool
    ) -> None:
        store, record, buffer = self._state.store, current.record, current.buffer
        if buffer is None or store is None:
            return
        tickets = current.tickets
        if buffer.state is not None:
            if is_hit:
                self.cache_hit_bytes += record.padded_bytes
            elif current.is_new:
                storage_over(buffer.state).zero_()
            else:
                tickets.append(store.read(state_key(record), buffer.state))
        for subgroup in record.subgroups:
            if not buffer.parameters:
                continue
            memory = buffer.parameters[subgroup.name]
            if self._reads_parameter(current, subgroup, updates):
                tickets.append(store.read(parameter_key(subgroup), memory))
            elif self._has_gaps(subgroup):
                storage_over(memory).zero_()

    def _reads_parameter(
        self, current: _InFlight, subgroup: Subgroup, updates: Mapping[str, ParameterUpdate]
    ) -> bool:
        """Whether the pass needs the parameters; an fp32 master gives those that it updates."""
        if "master" not in current.record.sections_of(subgroup) or current.is_new:
            return True
        names = {p.facts.name for p in self._state.layout.parameters_in(subgroup)}
        return bool(names & self._state.edited or names - updates.keys())

    def _has_gaps(self, subgroup: Subgroup) -> bool:
        used = sum(
            min(p.stop, subgroup.stop) - max(p.start, subgroup.start)
            for p in self._state.layout.parameters_in(subgroup)
        )
        return used < subgroup.num_elements

    def _is_new(self, record: Record) -> bool:
        """Whether the record's state lives on storage and was never written."""
        state = self._state
        return (
            state.records is None
            and state.store is not None
            and state_key(record) not in state.store
        )

    def _update(self, current: _InFlight, updates: Mapping[str, ParameterUpdate]) -> None:
        for subgroup in current.record.subgroups:
            operands = self._operands(current, subgroup)
            self._honour_edits(subgroup, operands, is_new=current.is_new)
            for scales, ranges in self._ranges(subgroup, updates).items():
                self._kernels.adamw(operands, ranges, gradient_scales=scales)
        if self._state.records is not None:
            self._state.dirty.add(state_key(current.record))
        if self._state.parameters is not None:
            self._state.dirty.update(parameter_key(s) for s in current.record.subgroups)

    def _operands(self, current: _InFlight, subgroup: Subgroup) -> AdamWOperands:
        state, buffer = self._state, current.buffer
        shard = state.layout.shards[subgroup.shard]
        if state.parameters is not None:
            parameter = state.parameters[subgroup.shard][subgroup.start : subgroup.stop]
        else:
            assert buffer is not None
            dtype = getattr(torch, shard.dtype)
            parameter = parameter_view(buffer.parameters[subgroup.name], subgroup, dtype)
        if state.records is not None:
            base = state.records[current.record.name]
        else:
            assert buffer is not None and buffer.state is not None
            base = storage_over(buffer.state)
        sections = {
            name: base[s.offset_bytes : s.offset_bytes + s.num_bytes].view(getattr(torch, s.dtype))
            for name, s in current.record.sections_of(subgroup).items()
        }
        return AdamWOperands(
            parameter=parameter,
            gradient=state.gradients[subgroup.shard][subgroup.start : subgroup.stop],
            exp_avg=sections["exp_avg"],
            exp_avg_sq=sections["exp_avg_sq"],
            master_low=sections.get("master_low"),
            master=sections.get("master"),
        )

    def _honour_edits(self, subgroup: Subgroup, operands: AdamWOperands, *, is_new: bool) -> None:
        """Makes the master equal to the parameter where there is none yet or the user edited it."""
        for placed in self._state.layout.parameters_in(subgroup):
            if not is_new and placed.facts.name not in self._state.edited:
                continue
            start = max(placed.start, subgroup.start) - subgroup.start
            stop = min(placed.stop, subgroup.stop) - subgroup.start
            if operands.master_low is not None:
                operands.master_low[start:stop] = 0
            if operands.master is not None:
                operands.master[start:stop] = operands.parameter[start:stop]

    def _ranges(
        self, subgroup: Subgroup, updates: Mapping[str, ParameterUpdate]
    ) -> dict[tuple[float, ...], list[AdamWRange]]:
        """Returns the ranges that are updated, by the factors pending on their gradients."""
        ranges: dict[tuple[float, ...], list[AdamWRange]] = {}
        for placed in self._state.layout.parameters_in(subgroup):
            update = updates.get(placed.facts.name)
            if update is None:
                continue
            start = max(placed.start, subgroup.start) - subgroup.start
            stop = min(placed.stop, subgroup.stop) - subgroup.start
            if stop > start:
                ranges.setdefault(update.scales, []).append(
                    AdamWRange(start=start, stop=stop, scalars=update.scalars)
                )
        return ranges

    def _start_write(
        self, reading: deque[_InFlight], writing: deque[_InFlight], kept: Container[str]
    ) -> None:
        """Moves the record that was updated on to `writing`, if anything of it is stored."""
        current = reading.popleft()
        store, buffer = self._state.store, current.buffer
        if buffer is None or store is None:
            return
        writing.append(current)
        record, tickets = current.record, current.tickets
        tickets.clear()
        if buffer.state is not None and record.name in kept:
            buffer = current.buffer = self._window.keep(record, buffer)
            self._state.dirty.add(state_key(record))
        elif buffer.state is not None:
            self._state.dirty.discard(state_key(record))
            ticket = store.write(state_key(record), buffer.state, num_bytes=record.num_bytes)
            tickets.append(ticket)
        for subgroup in record.subgroups:
            if buffer.parameters:
                memory = buffer.parameters[subgroup.name]
                key = parameter_key(subgroup)
                tickets.append(store.write(key, memory, num_bytes=subgroup.parameter_bytes))

    def _write_back_left_out(
        self,
        records: Sequence[Record],
        touched: Container[str],
        kept: Container[str],
        writing: deque[_InFlight],
    ) -> None:
        """Starts writing cached records that this pass neither updates nor keeps."""
        store = self._state.store
        for record in records:
            if record.name in touched or record.name in kept:
                continue
            state, slot = (
                self._window.cached_state(record),
                self._window.cached.pop(record.name, None),
            )
            if state is None or slot is None or store is None:
                continue
            buffer = RecordBuffer(state_slot=slot, parameter_slot=None, state=state, parameters={})
            writing.append(_InFlight(record=record, buffer=buffer))
            if state_key(record) in self._state.dirty:
                self._state.dirty.discard(state_key(record))
                ticket = store.write(state_key(record), state, num_bytes=record.num_bytes)
                writing[-1].tickets.append(ticket)

    def _reap(self, writing: deque[_InFlight]) -> None:
        """Ends the writes that are done and frees their buffers."""
        for current in [current for current in writing if current.is_done()]:
            for ticket in current.tickets:
                ticket.wait()
            assert current.buffer is not None
            writing.remove(current)
            self._window.release(current.buffer)

    def _wait(self, current: _InFlight) -> None:
        started = time.perf_counter()
        for ticket in current.tickets:
            ticket.wait()
        if current.tickets:
            self.io_wait_s += time.perf_counter() - started

    def _abandon(self, *queues: Sequence[_InFlight]) -> None:
        """Waits for what is in flight, whatever it gives, and frees the buffers."""
        for current in (c for queue in queues for c in queue):
            for ticket in current.tickets:
                with contextlib.suppress(OffloadError):  # the first error is on its way
                    ticket.wait()
            if current.buffer is not None:
                self._window.release(current.buffer)


def state_key(record: Record) -> str:
    """Returns the name under which the store keeps the state of `record`."""
    return f"state/{record.name}"


def parameter_key(subgroup: Subgroup) -> str:
    """Returns the name under which the store keeps the parameters of `subgroup`."""
    return f"parameter/{subgroup.name}"
