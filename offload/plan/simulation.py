"""Runs steps of a model on a machine that need not be here, under the engine's own policies."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.plan.events import EventClock, Process, Server, Ticket
from offload.plan.machine import Machine
from offload.plan.simulated_passes import Fetch, Link, SimulatedPasses, Use, uses_of
from offload.plan.simulated_path import Direction, SimulatedPath
from offload.plan.simulated_store import SimulatedStore
from offload.plan.simulated_update import SimulatedUpdate, WindowSize
from offload.plan.work import RecordWork, StepWork
from offload.policy import Order, Overlap, Striping
from offload.sizes import MIB

_WARM_UP_STEPS = 3
"""Caches are filled in the first, shares of paths settle in the others."""
_MEASURED_STEPS = 2
"""Forth and back of an alternating order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """The rates of a machine and what of it works at the same time."""

    rates: Machine
    link_bytes_per_s: float | None = None
    """To the device, each way; None: the device computes in host memory."""
    shares_cores: bool = True
    """Whether passes and kernels run on the same cores, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPolicy:
    """What decides, as objects, and the room that it has."""

    order: Order
    striping: Striping
    window: WindowSize
    overlap: Overlap | None = None
    """What decides where updates run under the next forward pass; None: they do not."""
    updates_in_backward: bool = False
    """Whether an update runs as soon as its gradients are complete."""
    num_slots: int = 1
    prefetch_distance: int = 0
    block_bytes: int = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step in steady state. Times in seconds of the thread that trains."""

    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    """What of the update is exposed: waits of passes for it are here, and not in theirs."""
    other_s: float
    exposed_io_s: float
    """Time in which passes, and exposed updates, wait for storage."""
    read_bytes: int
    write_bytes: int
    path_bytes: tuple[int, ...]
    """Both directions, by path."""


@dataclass(slots=True, kw_only=True)
class _Marks:
    """Where the clock and the counters were at the borders of a step's phases."""

    begin_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    other_s: float = 0.0
    end_s: float = 0.0
    io_wait_s: float = 0.0
    read_bytes: int = 0
    write_bytes: int = 0
    path_bytes: list[int] = field(default_factory=list)


def simulate(work: StepWork, machine: SimulatedMachine, policy: SimulatedPolicy) -> SimulatedStep:
    """Returns a step in steady state: the mean of two after the first three."""
    return _Simulation(work, machine, policy).run()


class _Simulation:
    def __init__(self, work: StepWork, machine: SimulatedMachine, policy: SimulatedPolicy) -> None:
        self._clock = clock = EventClock()
        self._work = work
        self._policy = policy
        self._uses = uses_of(work)
        rates = machine.rates
        self._store = SimulatedStore(
            [SimulatedPath(clock, path) for path in rates.paths],
            striping=policy.striping,
            block_bytes=policy.block_bytes,
        )
        self._cores = Server(clock)

        def kernel_s(record: RecordWork, moved_bytes: int) -> float:
            return (
                work.record_s
                + record.num_parameters / rates.update_parameters_per_s
                + moved_bytes / rates.copy_bytes_per_s
            )

        self._update = SimulatedUpdate(
            clock,
            self._store,
            work,
            window=policy.window,
            order=policy.order,
            kernels=self._cores,
            kernel_s=kernel_s,
        )
        self._passes = SimulatedPasses(
            clock,
            self._store,
            work,
            num_slots=policy.num_slots,
            prefetch_distance=policy.prefetch_distance,
            compute=self._cores if machine.shares_cores else Server(clock),
            link=Link(clock, machine.link_bytes_per_s),
        )
        self._records_of: list[list[int]] = [[] for _ in work.units]
        for index, record in enumerate(work.records):
            for piece in record.pieces:
                self._records_of[piece.unit].append(index)
        self._updated = [_happened() for _ in work.records]
        self._slotted: list[Ticket] = []
        """Of each unit, when it has a slot in the forward that the pending update runs under."""
        self._pending = _happened()
        """The update of the step before, where it runs under the next forward."""
        self._marks: list[_Marks] = []

    def run(self) -> SimulatedStep:
        self._update.place()
        self._passes.place()
        ended = self._clock.spawn(self._steps(_WARM_UP_STEPS + _MEASURED_STEPS))
        self._clock.run_until(ended)
        return _mean(self._marks[_WARM_UP_STEPS:])

    def _steps(self, count: int) -> Process:
        for step in range(1, count + 1):
            yield from self._step(step)

    def _step(self, step: int) -> Process:
        clock, policy, uses = self._clock, self._policy, self._uses
        marks = _Marks(begin_s=clock.now_s)
        before = self._counters()
        fetched: dict[int, Fetch] = {}
        complete = [Ticket() for _ in self._work.records]
        stepped = Ticket()
        spills: list[Ticket] = []
        update: Ticket | None = None
        position = 0
        while position < len(uses):
            use, began_s = uses[position], clock.now_s
            before_s = self._passes.update_wait_s
            is_last = use.micro_step == self._work.micro_steps - 1
            overlaps = policy.overlap is not None or policy.updates_in_backward
            if is_last and use.is_backward and overlaps:
                update = self._begin_update(step, complete, stepped)
            yield from self._passes.run(
                uses,
                first=position,
                fetched=fetched,
                may_fetch=self._may_fetch,
                on_backward=lambda use, down: self._on_backward(use, down, complete, spills),
            )
            yield spills  # a record's gradients have left memory when the pass ends
            spills.clear()
            pass_s = clock.now_s - began_s - (self._passes.update_wait_s - before_s)
            if use.is_backward:
                marks.backward_s += pass_s
            else:
                marks.forward_s += pass_s
            position += len(self._work.units)
        began_s = clock.now_s
        yield self._cores.serve(self._work.other_s)
        marks.other_s = clock.now_s - began_s
        stepped.complete()
        waited_s = self._update.io_wait_s
        if update is None:
            update = self._begin_update(step, complete, stepped)
        if policy.overlap is not None:
            self._pending = update
        else:
            yield update
        marks.end_s = clock.now_s
        marks.io_wait_s = self._passes.io_wait_s - before.passes_wait_s
        if policy.overlap is None:
            marks.io_wait_s += self._update.io_wait_s - waited_s
        after = self._counters()
        marks.read_bytes = after.read_bytes - before.read_bytes
        marks.write_bytes = after.write_bytes - before.write_bytes
        marks.path_bytes = [b - a for a, b in zip(before.path_bytes, after.path_bytes, strict=True)]
        self._marks.append(marks)

    def _begin_update(self, step: int, complete: Sequence[Ticket], stepped: Ticket) -> Ticket:
        """Starts the step's update: what it reads comes now, passes over it when they may.

        Args:
            step: From 1.
            complete: Done when the gradients of each record are.
            stepped: Done when the optimizer is asked to step.
        """
        policy = self._policy
        updated = [Ticket() for _ in self._work.records]
        slotted = [Ticket() for _ in self._work.units]
        ready: Sequence[Ticket] = complete
        sequence: Sequence[int] | None = None
        if not policy.updates_in_backward:
            ready = [stepped] * len(complete)
            if policy.overlap is not None:
                units = [[piece.unit for piece in record.pieces] for record in self._work.records]
                sequence = policy.overlap.sequence(units, range(len(self._work.units)))
        else:
            # Those in memory have nowhere else to put their new values before the step.
            kept = policy.order.kept(len(complete), policy.window.num_cached, step)
            ready = [stepped if i in kept else done for i, done in enumerate(complete)]
            arriving = [
                index
                for unit in reversed(range(len(self._work.units)))
                for index in self._passes.records_completed_by(unit)
            ]
            # These then come in the order of the next forward.
            sequence = [index for index in arriving if index not in kept] + sorted(kept)
        if policy.overlap is not None:
            self._updated, self._slotted = updated, slotted
            ready = [
                self._clock.spawn(_wait([gate, *self._slots_of(record, slotted)]))
                if gate is stepped
                else gate
                for gate, record in zip(ready, self._work.records, strict=True)
            ]
        before = self._pending

        def process() -> Process:
            yield before  # one update at a time
            yield from self._update.run(
                step,
                ready=lambda index: ready[index],
                on_updated=lambda index: updated[index].complete(),
                sequence=sequence,
            )

        return self._clock.spawn(process())

    def _may_fetch(self, use: Use) -> Ticket:
        """A unit's parameters are there when every record of it is updated.

        Who asks has a slot for it, which the updates wait for.
        """
        if self._policy.overlap is None or use.micro_step or use.is_backward:
            return _happened()
        if self._slotted and not self._slotted[use.unit].is_done:
            self._slotted[use.unit].complete()
        return self._clock.spawn(_wait([self._updated[i] for i in self._records_of[use.unit]]))

    def _slots_of(self, record: RecordWork, slotted: Sequence[Ticket]) -> list[Ticket]:
        return [slotted[piece.unit] for piece in record.pieces if piece.is_handed_over]

    def _on_backward(
        self, use: Use, down: Ticket, complete: Sequence[Ticket], spills: list[Ticket]
    ) -> None:
        is_last = use.micro_step == self._work.micro_steps - 1
        for index in self._passes.records_completed_by(use.unit):
            added = self._clock.spawn(self._store_gradients(index, down, use.micro_step))
            if self._work.records[index].spilled_bytes:
                spills.append(added)
            if is_last:
                added.on_done(complete[index].complete)

    def _store_gradients(self, index: int, down: Ticket, micro_step: int) -> Process:
        yield down
        if micro_step:
            yield self._passes.read_spilled(index)
        yield self._passes.spill(index)

    def _counters(self) -> "_Counters":
        return _Counters(
            read_bytes=self._store.moved_bytes(Direction.READ),
            write_bytes=self._store.moved_bytes(Direction.WRITE),
            path_bytes=[sum(path.moved_bytes.values()) for path in self._store.paths],
            passes_wait_s=self._passes.io_wait_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    read_bytes: int
    write_bytes: int
    path_bytes: list[int]
    passes_wait_s: float


def _happened() -> Ticket:
    ticket = Ticket()
    ticket.complete()
    return ticket


def _wait(tickets: Sequence[Ticket]) -> Process:
    yield tickets


def _mean(steps: Sequence[_Marks]) -> SimulatedStep:
    count = len(steps)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count

    step_s = mean([m.end_s - m.begin_s for m in steps])
    forward_s = mean([m.forward_s for m in steps])
    backward_s = mean([m.backward_s for m in steps])
    other_s = mean([m.other_s for m in steps])
    return SimulatedStep(
        step_s=step_s,
        forward_s=forward_s,
        backward_s=backward_s,
        other_s=other_s,
        update_s=max(step_s - forward_s - backward_s - other_s, 0.0),
        exposed_io_s=mean([m.io_wait_s for m in steps]),
        read_bytes=round(mean([m.read_bytes for m in steps])),
        write_bytes=round(mean([m.write_bytes for m in steps])),
        path_bytes=tuple(
            round(mean(amounts)) for amounts in zip(*(m.path_bytes for m in steps), strict=True)
        ),
    )
