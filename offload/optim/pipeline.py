"""The update phase: read a record, one fused pass, write it back, many records in flight."""

import contextlib
import time
import traceback
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.errors import BudgetError, OffloadError
from offload.layout import Record, Subgroup
from offload.memory import storage_over
from offload.optim.kernels import Kernels
from offload.optim.model_state import (
    ModelState,
    ParameterUpdate,
    Transfer,
    parameter_key,
    state_key,
)
from offload.optim.record_source import InOrder
from offload.optim.record_update import RecordUpdate
from offload.optim.update_job import UpdateJob
from offload.optim.window import RecordBuffer, Window
from offload.storage.engine import Priority
from offload.storage.stalls import CHECKSUM, StallAccount, path_label
from offload.storage.store import BlockStore
from offload.storage.wakeup import Wakeup

__all__ = [
    "ModelState",
    "ParameterUpdate",
    "UpdatePipeline",
    "parameter_key",
    "state_key",
]


_PRIORITY = Priority.WRITE_BACK
"""Of reads too: of one priority as much is in flight each way, and fetches of units come first."""


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    """A record in the window and the transfers that it waits for."""

    record: Record
    buffer: RecordBuffer | None
    tickets: list[Transfer] = field(default_factory=list)
    is_new: bool = False
    """Its state was never written: it is zero, and a whole master starts as the parameter."""
    was_updated: bool = False

    def is_done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)


class UpdatePipeline:
    """Updates records, reading, computing and writing at the same time.

    The pass runs over any record that is there, and waits only while none is.

    Ownership: A buffer belongs to its record from the read until its write is done; then it
        takes the next record.
    Concurrency: One thread at a time; transfers run in the I/O engine's threads, the pass on the
        kernels' own.
    """

    def __init__(
        self,
        state: ModelState,
        window: Window,
        kernels: Kernels,
        stalls: StallAccount | None = None,
    ) -> None:
        self.state = state
        self.window = window
        self.cache_hit_bytes = 0
        self.stalls = stalls or StallAccount()
        self.read_bytes = 0
        """Of records and parameters, from storage, padding included."""
        self.prefetched_bytes = 0
        """Of records that were read before their update was asked for."""
        self._compute = RecordUpdate(state, kernels)
        self._ahead: list[_InFlight] = []
        self._wakeup = Wakeup()
        self._waited_s: dict[str, float] = {}
        self._waits_for = CHECKSUM  # what the last wait was for
        self._waiting_since_s: float | None = None

    def run(
        self,
        order: Iterable[Record],
        updates: Mapping[str, ParameterUpdate],
        *,
        kept: Container[str] = (),
    ) -> None:
        """Applies `updates`, by parameter name, record by record, and what the user edited.

        A record none of whose parameters is updated or edited is neither read nor written.

        Args:
            order: Every record once.
            updates: What is updated; a record is touched if any parameter of it is.
            kept: Names of records whose state stays in memory after its update, not written.

        Raises:
            StorageError, CorruptStateError: A transfer failed. Records written before keep
                their new version until the next commit or close.
        """
        edited = frozenset(self.state.edited)
        touched = self.touched(order, updates.keys() | edited)
        self.carry_out(
            UpdateJob(
                source=InOrder(touched, that_wait=self.window.records_that_wait),
                touched=frozenset(record.name for record in touched),
                updates=updates,
                edited=edited,
                kept=kept,
                stalls=self.stalls,
            )
        )
        self.state.edited -= edited

    def touched(self, records: Iterable[Record], names: Collection[str]) -> list[Record]:
        """Returns the records that hold any of the named parameters."""
        layout, wanted = self.state.layout, set(names)
        return [
            record
            for record in records
            if any(
                placed.facts.name in wanted
                for subgroup in record.subgroups
                for placed in layout.parameters_in(subgroup)
            )
        ]

    def carry_out(self, job: UpdateJob) -> None:
        """Carries out a step's updates; see `run`, but what was edited stays noted."""
        ahead, self._ahead = self._ahead, []
        _Run(self, job, ahead).finish()

    # Reading before the update is known.

    def prefetch(self, records: Sequence[Record]) -> None:
        """Starts reading the state of `records`, as far as there are free buffers.

        What is in memory, or was never written, is left out. The next step uses what is here, or
        gives it up.
        """
        store = self.state.store
        known = {current.record.name for current in self._ahead}
        for record in records:
            if store is None or record.name in known or record.name in self.window.cached:
                continue
            if self.state.records is not None or state_key(record) not in store:
                continue
            buffer = self.window.try_lease(record)
            if buffer is None:
                return
            current = _InFlight(record=record, buffer=buffer)
            self._start_ahead(current, store)
            self._ahead.append(current)

    def _start_ahead(self, current: _InFlight, store: BlockStore) -> None:
        """Starts reading a record; what is not started keeps no buffer."""
        record, buffer = current.record, current.buffer
        if buffer is None or buffer.state is None:
            return
        try:
            ticket = store.read(state_key(record), buffer.state, priority=_PRIORITY)
        except Exception:  # after an interrupt a transfer may be on its way: it has the buffer
            self.release(current)
            raise
        current.tickets.append(ticket)
        self.prefetched_bytes += record.padded_bytes
        self.read_bytes += record.padded_bytes

    def drop_prefetched(self) -> None:
        """Gives the buffers of what was prefetched back."""
        ahead, self._ahead = self._ahead, []
        self.abandon(ahead)

    # What a run asks.

    def is_new(self, record: Record) -> bool:
        """Whether the record's state lives on storage and was never written."""
        state = self.state
        return (
            state.records is None
            and state.store is not None
            and state_key(record) not in state.store
        )

    def compute(self, current: _InFlight, job: UpdateJob) -> None:
        self._compute.run(
            current.record,
            current.buffer,
            job.updates,
            edited=job.edited,
            is_new=current.is_new,
        )

    def watch(self, current: _InFlight) -> None:
        """Has the transfers of a record end the wait for any."""
        for ticket in current.tickets:
            ticket.notify(self._wakeup.fd)

    def wait_any(self, current: _InFlight, job: UpdateJob, cause: str) -> None:
        """Waits until a transfer has ended or `wake` was called; `current` is what it is for."""
        path = next((i for t in current.tickets if (i := t.waits_for()) is not None), None)
        store = self.state.store
        if store is not None and path is not None:  # else it ended just now: the wait is none
            self._waits_for = path_label(store.roots[path])
        self._waiting_since_s = started_s = time.perf_counter()
        self._wakeup.wait()
        self._waiting_since_s = None
        duration_s = time.perf_counter() - started_s
        self._waited_s[self._waits_for] = self._waited_s.get(self._waits_for, 0.0) + duration_s
        job.stalls.add(self._waits_for, cause, duration_s)

    @property
    def io_wait_s(self) -> float:
        """Time in which there was nothing to do but wait for storage, up to now."""
        return sum(self.io_waits().values())

    def io_waits(self) -> dict[str, float]:
        """Returns the same by what was waited for, as in a stall account. Any thread."""
        since_s, waits_for = self._waiting_since_s, self._waits_for
        found = dict(self._waited_s)
        if since_s is not None:
            found[waits_for] = found.get(waits_for, 0.0) + time.perf_counter() - since_s
        return found

    def wait_woken(self) -> None:
        """Waits until `wake` is called: there is nothing to do."""
        self._wakeup.wait()

    def wake(self) -> None:
        """Ends a wait, since the source may have changed its mind."""
        self._wakeup.wake()

    def release(self, current: _InFlight) -> None:
        if current.buffer is not None:
            self.window.release(current.buffer)

    def abandon(self, *queues: Sequence[_InFlight], was_interrupted: bool = False) -> None:
        """Waits for what is in flight, whatever it gives, and frees the buffers.

        After an interrupt there may be transfers that nobody knows of: what they use is free when
        they are over.
        """
        for current in (c for queue in queues for c in queue):
            for ticket in current.tickets:
                with contextlib.suppress(OffloadError):  # the first error is on its way
                    ticket.wait()
            if not was_interrupted:
                self.release(current)
            current.tickets.clear()
            current.buffer = None


class _Run:
    """One step's way through the pipeline."""

    def __init__(self, pipeline: UpdatePipeline, job: UpdateJob, ahead: list[_InFlight]) -> None:
        self._pipeline = pipeline
        self._state = pipeline.state
        self._window = pipeline.window
        self._job = job
        self._reading = ahead
        self._writing: list[_InFlight] = []
        self._left_out = [] if job.is_staged else self._cached_and_left_out()

    @torch.no_grad()
    def finish(self) -> None:
        reading, writing = self._reading, self._writing
        try:
            self._take_over_prefetched()
            source = self._job.source
            while (
                source.is_open()
                or source.peek() is not None
                or (reading or writing or self._left_out)
            ):
                self._reap()
                self._write_back_left_out()
                self._read_ahead()
                ready = [current for current in reading if current.is_done()]
                coming = [current for current in reading if current not in ready]
                is_stuck = not (coming or writing)
                if (current := self._choose(ready, is_stuck=is_stuck)) is not None:
                    self._update(current)
                elif coming:
                    self._pipeline.wait_any(coming[0], self._job, "reading records")
                elif writing:
                    self._pipeline.wait_any(writing[0], self._job, "writing records")
                elif ready or source.is_open():
                    self._pipeline.wait_woken()
                elif source.peek() is not None or self._left_out:
                    raise self._stuck()
        except BaseException as error:
            was_interrupted = not isinstance(error, Exception)
            self._pipeline.abandon(reading, writing, was_interrupted=was_interrupted)
            if was_interrupted:  # who keeps it must not keep buffers
                traceback.clear_frames(error.__traceback__)
            raise

    def _stuck(self) -> BudgetError:
        return BudgetError(
            f"cannot update records: expected room in the window, found all "
            f"{self._window.num_places_taken} places taken and nothing in flight, as after an "
            "interrupt; close the session and resume from the last commit"
        )

    def _take_over_prefetched(self) -> None:
        """Goes on with what was read ahead and is touched; gives up the rest."""
        unused = [c for c in self._reading if c.record.name not in self._job.touched]
        for current in unused:
            self._reading.remove(current)
        self._pipeline.abandon(unused)
        for current in self._reading:
            self._job.source.take(current.record)
            self._read_parameters(current)
            self._read_gradients(current)
            self._pipeline.watch(current)

    def _read_ahead(self) -> None:
        """Starts reading the next records, as long as there are free buffers."""
        while (record := self._job.source.peek()) is not None:
            buffer: RecordBuffer | None = None
            is_hit = record.name in self._window.cached
            if not self._window.is_empty:
                buffer = self._window.try_lease(record)
                if buffer is None:
                    return
            elif self._reading:
                return
            is_new = self._pipeline.is_new(record) and not is_hit
            self._job.source.take(record)
            current = _InFlight(record=record, buffer=buffer, is_new=is_new)
            self._reading.append(current)
            self._read_state(current, is_hit=is_hit)
            self._read_parameters(current)
            self._read_gradients(current)
            self._pipeline.watch(current)

    def _read_gradients(self, current: _InFlight) -> None:
        spilled, buffer = self._state.spilled, current.buffer
        if spilled is None or buffer is None:
            return
        for subgroup in current.record.subgroups:
            memory = buffer.gradients.get(subgroup.name)
            names = {p.facts.name for p in self._state.layout.parameters_in(subgroup)}
            if memory is not None and names & self._job.updates.keys():
                current.tickets.append(spilled.start_reading(subgroup, memory))
                self._pipeline.read_bytes += len(memory)

    def _read_state(self, current: _InFlight, *, is_hit: bool) -> None:
        store, record, buffer = self._state.store, current.record, current.buffer
        if buffer is None or store is None or buffer.state is None:
            return
        if is_hit:
            self._pipeline.cache_hit_bytes += record.padded_bytes
        elif current.is_new:
            storage_over(buffer.state).zero_()
        else:
            current.tickets.append(store.read(state_key(record), buffer.state, priority=_PRIORITY))
            self._pipeline.read_bytes += record.padded_bytes

    def _read_parameters(self, current: _InFlight) -> None:
        store, buffer = self._state.store, current.buffer
        if buffer is None or store is None or not buffer.parameters:
            return
        for subgroup in current.record.subgroups:
            memory = buffer.parameters[subgroup.name]
            if self._reads_parameter(current, subgroup):
                current.tickets.append(
                    store.read(parameter_key(subgroup), memory, priority=_PRIORITY)
                )
                self._pipeline.read_bytes += subgroup.padded_parameter_bytes
            elif self._has_gaps(subgroup):
                storage_over(memory).zero_()

    def _reads_parameter(self, current: _InFlight, subgroup: Subgroup) -> bool:
        """Whether the pass needs the parameters; an fp32 master gives those that it updates."""
        if "master" not in current.record.sections_of(subgroup) or current.is_new:
            return True
        names = {p.facts.name for p in self._state.layout.parameters_in(subgroup)}
        return bool(names & self._job.edited or names - self._job.updates.keys())

    def _has_gaps(self, subgroup: Subgroup) -> bool:
        used = sum(
            min(p.stop, subgroup.stop) - max(p.start, subgroup.start)
            for p in self._state.layout.parameters_in(subgroup)
        )
        return used < subgroup.num_elements

    def _choose(self, ready: Sequence[_InFlight], *, is_stuck: bool) -> _InFlight | None:
        """Returns which of the records that are there is updated next, if one may be."""
        if not ready:
            return None
        records = [current.record for current in ready]
        record = self._job.source.choose(records, is_stuck=is_stuck)
        return next((current for current in ready if current.record is record), None)

    def _update(self, current: _InFlight) -> None:
        """Updates a record that is there, and starts writing it."""
        for ticket in current.tickets:
            ticket.wait()
        self._pipeline.compute(current, self._job)
        self._reading.remove(current)
        self._start_write(current)
        if self._state.parameters is not None:
            self._job.on_updated(current.record)
        elif current.buffer is not None:
            self._job.on_computed(current.record, current.buffer.parameters)

    def _start_write(self, current: _InFlight) -> None:
        """Moves the record that was updated on to `writing`, if anything of it is stored."""
        store, buffer = self._state.store, current.buffer
        if buffer is None or store is None:
            return
        self._writing.append(current)
        record, tickets = current.record, current.tickets
        current.was_updated = True
        tickets.clear()
        if buffer.state is not None and record.name in self._job.kept:
            buffer = current.buffer = self._window.keep(record, buffer)
            self._state.dirty.add(state_key(record))
        elif buffer.state is not None:
            if not self._job.is_staged:
                self._state.dirty.discard(state_key(record))
            write = store.write_staged if self._job.is_staged else store.write
            tickets.append(write(state_key(record), buffer.state, num_bytes=record.num_bytes))
        for subgroup in record.subgroups:
            if buffer.parameters:
                memory = buffer.parameters[subgroup.name]
                key = parameter_key(subgroup)
                write = store.write_staged if self._job.is_staged else store.write
                tickets.append(write(key, memory, num_bytes=subgroup.parameter_bytes))
        self._pipeline.watch(current)

    def _cached_and_left_out(self) -> list[Record]:
        """Returns the records in memory that this step neither updates nor keeps."""
        return [
            record
            for record in self._state.layout.records
            if record.name in self._window.cached
            and record.name not in self._job.touched
            and record.name not in self._job.kept
        ]

    def _write_back_left_out(self) -> None:
        """Starts writing what is left out, as far as there are places: room was made for these."""
        store = self._state.store
        while self._left_out:
            record = self._left_out[0]
            buffer = self._window.try_take_cached(record)
            if buffer is None:
                return
            self._left_out.pop(0)
            assert buffer.state is not None
            assert store is not None
            current = _InFlight(record=record, buffer=buffer)
            self._writing.append(current)
            if state_key(record) in self._state.dirty:
                self._state.dirty.discard(state_key(record))
                ticket = store.write(state_key(record), buffer.state, num_bytes=record.num_bytes)
                current.tickets.append(ticket)
                self._pipeline.watch(current)

    def _reap(self) -> None:
        """Ends the writes that are done and frees their buffers."""
        for current in [current for current in self._writing if current.is_done()]:
            for ticket in current.tickets:
                ticket.wait()
            self._writing.remove(current)
            self._pipeline.release(current)
            if current.was_updated and self._state.parameters is None:
                self._job.on_updated(current.record)
