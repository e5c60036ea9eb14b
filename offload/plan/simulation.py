"""Runs steps of a model on a machine that need not be here, under the engine's own policies."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.plan.events import EventClock, Process, Server, Ticket
from offload.plan.machine import Machine
from offload.plan.simulated_passes import Fetch, Link, SimulatedPasses, Use, uses_of
from offload.plan.simulated_path import Direction, SimulatedPath
from offload.plan.simulated_pending import PendingUpdate
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
    num_staged: int | None = None
    """Units on their way from storage to a device at one time; None: any number."""
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
    """Time in which passes, and exposed updates, wait for storage or the link."""
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
        self._link = Link(clock, rates.link)

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
            link=self._link,
            update_io_wait_s=lambda: self._update.io_wait_s,
            num_staged=policy.num_staged,
        )
        self._pending: PendingUpdate | None = None
        """The update of the step before, and what of it the passes wait for."""
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
        spills: list[Ticket] = []
        pending = PendingUpdate(self._work, copy_up=self._link.up, overlap=policy.overlap)
        early = _happened()
        for position in range(0, len(uses), len(self._work.units)):
            use, began_s = uses[position], clock.now_s
            before_s = self._passes.update_wait_s
            if use.is_backward:
                yield from self._before_gradients(step, use)
                if policy.updates_in_backward and use.micro_step == self._work.micro_steps - 1:
                    early = clock.spawn(self._update_early(step, pending, complete))
            yield from self._passes.run(
                uses,
                first=position,
                fetched=fetched,
                may_fetch=self._may_fetch,
                on_need=self._on_need,
                on_backward=lambda use, down: self._on_backward(use, down, complete, spills),
            )
            yield spills  # a record's gradients have left memory when the pass ends
            spills.clear()
            pass_s = clock.now_s - began_s - (self._passes.update_wait_s - before_s)
            if use.is_backward:
                marks.backward_s += pass_s
            else:
                marks.forward_s += pass_s
        began_s = clock.now_s
        yield from self._passes.settle()
        yield self._cores.serve(self._work.other_s)
        marks.other_s = clock.now_s - began_s
        waited_s = self._update.io_wait_s
        yield early
        self._clock.spawn(self._update_rest(step, pending))
        self._pending = pending
        if policy.overlap is None:
            yield [pending.over, pending.all_here()]
        marks.end_s = clock.now_s
        self._note(marks, before, update_wait_s=self._update.io_wait_s - waited_s)

    def _note(self, marks: _Marks, before: "_Counters", *, update_wait_s: float) -> None:
        """Adds what was counted in a step.

        Args:
            marks: Of the step.
            before: The counters when it began.
            update_wait_s: For which the thread that trains saw updates wait for storage.
        """
        after = self._counters()
        marks.io_wait_s = after.passes_wait_s - before.passes_wait_s + update_wait_s
        marks.read_bytes = after.read_bytes - before.read_bytes
        marks.write_bytes = after.write_bytes - before.write_bytes
        marks.path_bytes = [b - a for a, b in zip(before.path_bytes, after.path_bytes, strict=True)]
        self._marks.append(marks)

    def _before_gradients(self, step: int, use: Use) -> Process:
        """Waits until no update reads gradients any more, and reads ahead for the next one."""
        if use.micro_step or self._pending is None:
            return
        yield from self._passes.wait_for_update(self._pending.over)
        overlap = self._policy.overlap
        if overlap is not None and not self._policy.updates_in_backward:
            self._update.prefetch(
                overlap.prefetched(
                    self._sequence(step),
                    cached=self._update.cached,
                    capacity=self._update.num_free,
                    num_places=self._update.num_places_free,
                )
            )

    def _update_early(
        self, step: int, pending: PendingUpdate, complete: Sequence[Ticket]
    ) -> Process:
        """Updates records as their gradients are complete.

        Those in memory have nowhere else to put their new values before the step.
        """
        kept = self._kept(step)
        arriving = [
            index
            for unit in reversed(range(len(self._work.units)))
            for index in self._passes.records_completed_by(unit)
            if index not in kept
        ]
        yield from self._update.run(
            arriving, pending=pending, kept=(), may_read=lambda index: complete[index]
        )

    def _update_rest(self, step: int, pending: PendingUpdate) -> Process:
        """Updates what is not updated yet, when the optimizer is asked to step."""
        kept, sequence = self._kept(step), self._sequence(step)
        if self._policy.updates_in_backward:
            sequence = [index for index in sequence if index in kept]
        is_free = self._policy.overlap is None
        yield from self._update.run(
            sequence, pending=pending, kept=kept, is_free=is_free, is_chosen=not is_free
        )
        pending.over.complete()

    def _kept(self, step: int) -> frozenset[int]:
        """Returns the records whose state stays in memory after a step."""
        policy = self._policy
        return policy.order.kept(len(self._work.records), policy.window.num_cached, step)

    def _sequence(self, step: int) -> Sequence[int]:
        """Returns the records in the order of the next forward, or of the policy."""
        overlap, records = self._policy.overlap, self._work.records
        if overlap is None:
            return self._policy.order.sequence(len(records), step)
        units = [[piece.unit for piece in record.pieces] for record in records]
        return overlap.sequence(units, range(len(self._work.units)))

    def _may_fetch(self, use: Use) -> Ticket:
        """A unit's parameters are there when every record of it is updated."""
        if self._pending is None or use.micro_step or use.is_backward:
            return _happened()
        return self._pending.ask_for(use.unit)

    def _on_need(self, use: Use) -> None:
        if self._pending is not None:
            self._pending.need(use.unit)

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
