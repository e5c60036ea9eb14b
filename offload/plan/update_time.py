"""What windows and records are chosen by: the step that a plan gives, simulated on a usual machine.

The machine is the same for every plan, so that a run has the same records and moves the same bytes
wherever it is planned: a store keeps the records that it was laid out with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from offload.layout import ModelLayout
from offload.plan.host import HostPlan
from offload.plan.machine import Machine, PathRates
from offload.plan.simulated_update import WindowSize
from offload.plan.simulation import SimulatedMachine, SimulatedPolicy, simulate
from offload.plan.work import Piece, RecordWork, StepWork, UnitWork
from offload.policy import resolve_order, resolve_striping
from offload.sizes import MIB

_PATH = PathRates(
    path="usual", read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=0.75e9
)
"""Half way between half and full duplex: a short window loses nothing on the former, and most on
the latter."""
_MACHINE = Machine(paths=(_PATH,), copy_bytes_per_s=1e10, update_parameters_per_s=1e9)
_RECORD_BYTES = MIB // 2
"""What a record costs in every step beside its transfers, each way, as bytes that the path could
have moved: 0.7 ms, between the 0.2 to 0.4 ms of an update in memory and the milliseconds that
small records cost a fast path (docs/planning.md)."""
_MOST_RECORDS = 64
"""Of an update that is simulated: one of more takes as much longer as it has more to move."""
_MOST_BUFFERS, _MOST_PLACES = 8, 24
"""Of a window that is simulated: requests have no latency there, which more would hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A layout of a model and how host memory is cut for it."""

    layout: ModelLayout
    host: HostPlan


def fastest_plan(plans: Sequence[PlannedLayout]) -> PlannedLayout:
    """Returns the plan whose step is the shortest; of equal ones the first.

    Simulated are those alone whose bytes do not rule them out.

    Args:
        plans: Of one model, at least one.
    """
    steps = [_Step.of(plan) for plan in plans]
    best = min(range(len(plans)), key=lambda index: steps[index].least_s)
    best_s = _simulated_s(steps[best])
    for index, step in enumerate(steps):
        if step.least_s > best_s or index == best:
            continue
        step_s = _simulated_s(step)
        if (step_s, index) < (best_s, best):
            best, best_s = index, step_s
    return plans[best]


def simulated_step_s(plan: PlannedLayout) -> float:
    """Returns what a step takes that waits for nothing but storage, on the usual machine.

    What slots keep from forward to backward is taken from it: it may be below 0.
    """
    return _simulated_s(_Step.of(plan))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """All that a step's transfers depend on: an update of equal records, and what slots keep."""

    num_records: int
    num_parameters: int
    state_bytes: int
    """Of all records, where it lives on storage."""
    parameter_bytes: int
    """Of all records, where these live on storage."""
    spilled_bytes: int
    """Of gradients, written in backward and read by the update."""
    kept_bytes: int
    """Of parameters in slots, which backward does not read again."""
    window: WindowSize

    @staticmethod
    def of(plan: PlannedLayout) -> "_Step":
        layout, host = plan.layout, plan.host
        return _Step(
            num_records=max(len(layout.records), 1),
            num_parameters=layout.trainable_elements,
            state_bytes=layout.state_bytes if host.state_buffer_bytes else 0,
            parameter_bytes=layout.parameter_bytes if host.parameter_buffer_bytes else 0,
            spilled_bytes=host.gradients.spilled_bytes,
            kept_bytes=min(host.slot_bytes * host.num_slots, layout.parameter_bytes),
            window=WindowSize(
                num_buffers=min(max(host.num_buffers, 1), _MOST_BUFFERS),
                num_places=min(max(host.num_places, 1), _MOST_PLACES),
                num_cached=host.num_cached,
            ),
        )

    @cached_property
    def update_s(self) -> float:
        """The least time in which the path moves what the update reads and writes."""
        missed = 1 - self.window.num_cached / self.num_records
        both_bytes = self.state_bytes * missed + self.parameter_bytes
        both_bytes += _RECORD_BYTES * self.num_records
        return both_bytes / _PATH.mixed_bytes_per_s + self.spilled_bytes / _PATH.read_bytes_per_s

    @cached_property
    def passes_s(self) -> float:
        """What the passes' transfers take more than those of another plan of the model."""
        spilled_s = self.spilled_bytes / _PATH.write_bytes_per_s
        return spilled_s - self.kept_bytes / _PATH.read_bytes_per_s

    @property
    def least_s(self) -> float:
        return self.update_s + self.passes_s

    def shortened(self) -> "_Step":
        """Returns one of no more than `_MOST_RECORDS`, of which as large a part is cached."""
        count = min(self.num_records, _MOST_RECORDS)

        def part(number: int) -> int:
            return round(number * count / self.num_records)

        window = self.window
        return _Step(
            num_records=count,
            num_parameters=part(self.num_parameters),
            state_bytes=part(self.state_bytes),
            parameter_bytes=part(self.parameter_bytes),
            spilled_bytes=part(self.spilled_bytes),
            kept_bytes=0,
            window=WindowSize(
                num_buffers=window.num_buffers,
                num_places=window.num_places,
                num_cached=part(window.num_cached),
            ),
        )

    def work(self) -> StepWork:
        count = self.num_records
        record = RecordWork(
            num_parameters=self.num_parameters // count,
            state_bytes=self.state_bytes // count,
            pieces=(
                Piece(
                    unit=0,
                    num_bytes=self.parameter_bytes // count + _RECORD_BYTES,
                    is_read=True,
                ),
            ),
            spilled_bytes=self.spilled_bytes // count,
        )
        return StepWork(units=(UnitWork(forward_s=0.0, backward_s=0.0),), records=(record,) * count)


def _simulated_s(step: _Step) -> float:
    shortened = step.shortened()
    return step.update_s * _simulated_update_s(shortened) / shortened.update_s + step.passes_s


@lru_cache(maxsize=1 << 12)
def _simulated_update_s(step: _Step) -> float:
    policy = SimulatedPolicy(
        order=resolve_order("resident" if step.window.num_cached else "sequential"),
        striping=resolve_striping("single"),
        window=step.window,
    )
    return simulate(step.work(), SimulatedMachine(rates=_MACHINE), policy).update_s
