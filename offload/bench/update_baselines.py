"""Two baselines beside the engine, written here after what the systems' papers describe.

They are ours and labelled as such: nothing of those systems runs. Both keep 12 bytes of fp32 state
per parameter in plain files, overwritten in place, without checksums or versions, and use the
engine's own I/O and kernels, so that what differs is what is moved when.

`deepspeed-like`: gradients go to storage in fp32 when backward ends (4 bytes per parameter), and
the update reads them back beside the state: 16 bytes in and out a step. In layout order, on the
first path, one read and one write in flight.

`mlp-like`: bf16 gradients stay in memory; subgroups lie on two paths in turns 2 : 1; the order
alternates, and as many bytes of state as the engine would cache stay in memory. Each path reads one
subgroup ahead of its update and has one write in flight: as several processes of a node would, and
so faster than a single one that took them in turns.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from offload.bench.update_io import engines_of
from offload.bench.update_options import PathBytes, UpdateOptions, made_up_values
from offload.layout import DTYPES, ModelLayout, Record, Subgroup
from offload.memory import Arena
from offload.optim.digest import Bytes, state_digest
from offload.optim.kernels import Operands, Range, load_kernels
from offload.optim.scalars import adamw_scalars
from offload.plan.host import HostPlan
from offload.policy import resolve_order
from offload.sizes import round_up
from offload.storage.engine import Priority, Ticket
from offload.storage.file import StorageFile, open_file
from offload.streaming.host_memory import HostMemory

_ALIGNMENT = 4096
_BUFFERS_OF_A_PATH = 3
"""One is read, one updated, one written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRules:
    """What tells the two apart."""

    order: str
    ratio: tuple[int, ...]
    """Turns of the paths."""
    spills_gradients: bool
    keeps_records: bool

    @property
    def turns(self) -> str:
        """The turns of the paths, for messages."""
        return " : ".join(map(str, self.ratio))


RULES = {
    "deepspeed-like": BaselineRules(
        order="sequential", ratio=(1,), spills_gradients=True, keeps_records=False
    ),
    "mlp-like": BaselineRules(
        order="alternating", ratio=(2, 1), spills_gradients=False, keeps_records=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a record lies."""

    path_index: int
    offset: int


@dataclass(slots=True, kw_only=True)
class _Reading:
    index: int
    buffer: memoryview
    ticket: Ticket | None
    """None where the record was cached."""


class BaselineUpdates:
    """Updates by the rules of a baseline; its files last as long as the context."""

    def __init__(
        self,
        layout: ModelLayout,
        plan: HostPlan,
        options: UpdateOptions,
        *,
        roots: Sequence[Path],
    ) -> None:
        """Stores its arguments.

        Args:
            layout: Of the made-up model, with codec `fp32`.
            plan: How the host memory is cut for the engine; the cache is as large in bytes.
            options: What is measured.
            roots: Directories for the files, one on each path; those without a turn stay empty.
        """
        self._layout = layout
        self._plan = plan
        self._options = options
        self._roots = roots
        self._rules = RULES[options.baseline]
        self._order = resolve_order(self._rules.order)
        self._kernels = load_kernels()
        self._stack = ExitStack()
        self._completed = 0
        self._moved = [[0, 0] for _ in roots]
        self._places = list(self._placed())
        self._slot_bytes = max(map(self._read_bytes, layout.records))
        self.num_cached = (
            plan.num_cached * plan.state_buffer_bytes // self._slot_bytes
            if self._rules.keeps_records
            else 0
        )
        self._cached: dict[int, memoryview] = {}
        self.hit_bytes = 0

    def __enter__(self) -> Self:
        with self._stack:
            engines = engines_of(self._options)
            self._engines = [self._stack.enter_context(each) for each in engines]
            self._files = [self._open(root) for root in self._roots]
            self._memory = HostMemory(self._plan)
            self._parameters, self._gradients = made_up_values(self._layout, self._memory)
            count = _BUFFERS_OF_A_PATH * len(self._rules.ratio) + self.num_cached
            arena = Arena(count * self._slot_bytes)
            arena.open()
            self._free = deque(arena.take(self._slot_bytes) for _ in range(count))
            self._write_first_state()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def before_update(self) -> None:
        """Writes the gradients in fp32 where the rules say so; waits for them."""
        if not self._rules.spills_gradients:
            return
        writing: deque[tuple[Ticket, memoryview]] = deque()
        for index, record in enumerate(self._layout.records):
            if not self._free:
                self._give_back(writing)
            buffer = self._free.popleft()
            gradients = _fp32(buffer, record.padded_bytes, _num_elements(record))
            torch.cat([self._gradient_of(s) for s in record.subgroups], out=gradients)
            part = buffer[record.padded_bytes : self._read_bytes(record)]
            ticket = self._write(index, part, offset=record.padded_bytes)
            writing.append((ticket, buffer))
        while writing:
            self._give_back(writing)

    def update(self, step: int) -> float:
        """Runs the update of a step, from 1, and returns its time."""
        started_s = time.perf_counter()
        count = len(self._layout.records)
        sequence = list(self._order.sequence(count, step))
        kept = self._order.kept(count, self.num_cached, step)
        waiting = [deque[int]() for _ in self._rules.ratio]
        for index in sequence:
            if index not in self._cached:
                waiting[self._places[index].path_index].append(index)
        reading: dict[int, _Reading] = {}
        writing = [deque[tuple[Ticket, memoryview]]() for _ in self._rules.ratio]
        for index in sequence:
            self._read_ahead(waiting, reading, writing)
            current = self._take(index, reading)
            self._read_ahead(waiting, reading, writing)
            self._pass(index, current.buffer, step)
            if index in kept:
                self._cached[index] = current.buffer
                continue
            path_index = self._places[index].path_index
            while writing[path_index]:  # one write in flight
                self._give_back(writing[path_index])
            record = self._layout.records[index]
            ticket = self._write(index, current.buffer[: record.padded_bytes])
            writing[path_index].append((ticket, current.buffer))
        for each in writing:
            while each:
                self._give_back(each)
        self._completed = step
        return time.perf_counter() - started_s

    def moved(self) -> list[PathBytes]:
        """Returns what each path moved so far, without the first state and digests."""
        return [
            PathBytes(path=str(path), read_bytes=read, write_bytes=written)
            for path, (read, written) in zip(self._options.paths, self._moved, strict=True)
        ]

    def digest(self) -> str:
        """Returns the digest of the state; what it reads counts for nothing."""
        counted = [list(each) for each in self._moved]
        digest = state_digest(
            self._layout,
            _StateReader(self),
            steps=dict.fromkeys(self._layout.parameters, self._completed),
            completed_steps=self._completed,
        )
        self._moved = counted
        return digest

    def state_of(self, record: Record) -> memoryview:
        """Returns the bytes of a record's state, from memory or read anew."""
        index = self._layout.records.index(record)
        if index in self._cached:
            return self._cached[index]
        buffer = self._free[0]
        self._read(index, buffer, record.padded_bytes).wait()
        return buffer

    def parameters_of(self, subgroup: Subgroup) -> torch.Tensor:
        """Returns the subgroup's parameters, which are in memory."""
        return self._parameters[subgroup.shard][subgroup.start : subgroup.stop]

    def _placed(self) -> Iterator[_Place]:
        """In turns: each path as often as its part of the ratio says."""
        ratio = self._rules.ratio[: len(self._roots)]
        turns = [index for index, part in enumerate(ratio) for _ in range(part)]
        ends = [0 for _ in self._roots]
        for index, record in enumerate(self._layout.records):
            path_index = turns[index % len(turns)]
            yield _Place(path_index=path_index, offset=ends[path_index])
            ends[path_index] += round_up(self._read_bytes(record), _ALIGNMENT)

    def _open(self, root: Path) -> StorageFile:
        root.mkdir(parents=True, exist_ok=True)
        file = open_file(root / "baseline.bin", create=True)
        self._stack.callback(file.close)
        return file

    def _read_bytes(self, record: Record) -> int:
        """Of the state, and of the fp32 gradients behind it."""
        gradients = 4 * _num_elements(record) if self._rules.spills_gradients else 0
        return record.padded_bytes + round_up(gradients, _ALIGNMENT)

    def _write_first_state(self) -> None:
        """Makes the master the parameter and all else zero."""
        for index, record in enumerate(self._layout.records):
            buffer = self._free[0]
            buffer[:] = bytes(len(buffer))
            for subgroup in record.subgroups:
                _section(record, subgroup, "master", buffer).copy_(self.parameters_of(subgroup))
            self._write(index, buffer[: self._read_bytes(record)]).wait()
        self._moved = [[0, 0] for _ in self._roots]

    def _read_ahead(
        self,
        waiting: Sequence[deque[int]],
        reading: dict[int, _Reading],
        writing: Sequence[deque[tuple[Ticket, memoryview]]],
    ) -> None:
        """Has each path read the next of its records, one ahead of the one that is updated."""
        for path_index, indices in enumerate(waiting):
            is_reading = any(self._places[i].path_index == path_index for i in reading)
            if not indices or is_reading:
                continue
            if not self._free:
                done = [each for each in writing if each]
                if not done:
                    return
                self._give_back(done[0])
            index, buffer = indices.popleft(), self._free.popleft()
            ticket = self._read(index, buffer, self._read_bytes(self._layout.records[index]))
            reading[index] = _Reading(index=index, buffer=buffer, ticket=ticket)

    def _take(self, index: int, reading: dict[int, _Reading]) -> _Reading:
        if index in self._cached:
            self.hit_bytes += self._layout.records[index].padded_bytes
            return _Reading(index=index, buffer=self._cached.pop(index), ticket=None)
        current = reading.pop(index)
        assert current.ticket is not None
        current.ticket.wait()
        return current

    def _pass(self, index: int, buffer: memoryview, step: int) -> None:
        scalars = adamw_scalars(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step)
        record = self._layout.records[index]
        first = 0
        for subgroup in record.subgroups:
            count = subgroup.num_elements
            gradient = self._gradient_of(subgroup)
            if self._rules.spills_gradients:
                start = record.padded_bytes + 4 * first
                gradient = _fp32(buffer, start, count)
            operands = Operands(
                rule=self._layout.rule,
                parameter=self.parameters_of(subgroup),
                gradient=gradient,
                master=_section(record, subgroup, "master", buffer),
                state={
                    name: _section(record, subgroup, name, buffer)
                    for name in ("exp_avg", "exp_avg_sq")
                },
            )
            ranges = [
                Range(
                    start=max(placed.start, subgroup.start) - subgroup.start,
                    stop=min(placed.stop, subgroup.stop) - subgroup.start,
                    scalars=scalars,
                )
                for placed in self._layout.parameters_in(subgroup)
            ]
            self._kernels.update(operands, ranges)
            first += count

    def _gradient_of(self, subgroup: Subgroup) -> torch.Tensor:
        return self._gradients[subgroup.shard][subgroup.start : subgroup.stop]

    def _read(self, index: int, buffer: memoryview, num_bytes: int) -> Ticket:
        place = self._places[index]
        self._moved[place.path_index][0] += num_bytes
        engine, file = self._engines[place.path_index], self._files[place.path_index]
        return engine.read(file, place.offset, buffer[:num_bytes], priority=Priority.PREFETCH)

    def _write(self, index: int, part: memoryview, *, offset: int = 0) -> Ticket:
        place = self._places[index]
        self._moved[place.path_index][1] += len(part)
        engine, file = self._engines[place.path_index], self._files[place.path_index]
        return engine.write(file, place.offset + offset, part)

    def _give_back(self, writing: deque[tuple[Ticket, memoryview]]) -> None:
        ticket, buffer = writing.popleft()
        ticket.wait()
        self._free.append(buffer)


class _StateReader:
    """Reads the state of a baseline for its digest."""

    def __init__(self, updates: BaselineUpdates) -> None:
        self._updates = updates

    def parameters(self, subgroup: Subgroup, start: int, stop: int) -> Iterator[Bytes]:
        values = self._updates.parameters_of(subgroup)[start:stop]
        yield values.contiguous().view(torch.uint8).numpy()

    def section(
        self, record: Record, subgroup: Subgroup, name: str, start: int, stop: int
    ) -> Iterator[Bytes]:
        values = _section(record, subgroup, name, self._updates.state_of(record))[start:stop]
        yield values.view(torch.uint8).numpy()


def _num_elements(record: Record) -> int:
    return sum(subgroup.num_elements for subgroup in record.subgroups)


def _section(record: Record, subgroup: Subgroup, name: str, buffer: memoryview) -> torch.Tensor:
    section = record.sections_of(subgroup)[name]
    count = section.num_bytes // DTYPES[section.dtype].itemsize
    return _fp32(buffer, section.offset_bytes, count)


def _fp32(buffer: memoryview, offset: int, count: int) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.float32, offset=offset, count=count)
