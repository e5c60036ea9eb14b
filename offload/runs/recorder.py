"""Turns what a step did and what the session counted into figures."""

import itertools
import math
import statistics
from dataclasses import asdict, dataclass, field, replace

from offload.plan.bound import Bound, ComputeTimes, step_bound
from offload.plan.exposed import ExposedPhases, MeasuredPass, exposed_phases
from offload.plan.link import LinkTraffic
from offload.plan.machine import Machine
from offload.plan.observed import raised_to_steps
from offload.plan.traffic import StepTraffic
from offload.plan.wear import wear
from offload.runs.loop import StepOutcome
from offload.runs.metrics import StepMetrics
from offload.runs.phases import Span, StepTimes
from offload.runs.result import NUM_WARM_UP_STEPS, ratio
from offload.session import SessionStats
from offload.storage.stalls import stalls_between
from offload.streaming.counters import MovedBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """All that is known of one step when it is done."""

    step: int
    outcome: StepOutcome
    times: StepTimes
    before: SessionStats
    after: SessionStats
    validated: SessionStats
    """After the validation that followed the step, if one did."""
    rss_bytes: int
    committed: int | None
    validation_loss: float | None


@dataclass(slots=True, kw_only=True)
class StepRecorder:
    """Makes the metrics of steps and keeps those of this process."""

    tokens_per_step: int
    traffic: StepTraffic
    num_parameters: int
    """P of the bound: trainable parameters."""
    machine: Machine | None
    """None where no bound applies."""
    overlap: str = "none"
    prefetched_bytes: int = 0
    """Q of the bound: records that are read in backward."""
    link: LinkTraffic | None = None
    """Bytes of a step over the link to a device; None where there is none."""
    shares_cores: bool = True
    """Whether passes compute on the cores on which updates do."""
    steps: list[StepMetrics] = field(default_factory=list)
    _times: list[StepTimes] = field(default_factory=list)
    _plain_forward_s: float = math.inf
    _since: MovedBytes | None = None
    _validation_bytes: int = 0
    _hits: int = 0
    _misses: int = 0

    def record(self, facts: StepFacts) -> StepMetrics:
        """Returns the metrics of one step and keeps them."""
        times, before, after = facts.times, facts.before, facts.after
        self._note_plain_forwards(times)
        bound = self._bound(times, self.machine)
        phases = self._phases(times, bound)
        moved = self._moved(facts)
        metrics = StepMetrics(
            step=facts.step,
            loss=facts.outcome.loss,
            lr=facts.outcome.lr,
            grad_norm=facts.outcome.grad_norm,
            tokens=self.tokens_per_step,
            tokens_per_s=self.tokens_per_step / times.step_s,
            step_s=times.step_s,
            forward_s=phases.forward_s,
            backward_s=phases.backward_s,
            update_s=phases.update_s,
            other_s=times.other_s,
            io_wait_s=times.io_wait_s,
            read_bytes=moved.read_bytes,
            write_bytes=moved.write_bytes,
            cache_hit_bytes=moved.cache_hit_bytes,
            host_peak_bytes=after.host_peak_bytes,
            device_peak_bytes=after.device_peak_bytes,
            rss_bytes=facts.rss_bytes,
            bound_s=bound.step_s if bound else None,
            achieved_over_bound=ratio(bound.step_s, times.step_s) if bound else None,
            committed=facts.committed,
            activation_offload_bytes=(
                after.activation_offload_bytes - before.activation_offload_bytes
            ),
            skipped=facts.outcome.skipped,
            validation_loss=facts.validation_loss,
            written_bytes_per_day=_per_day(moved.write_bytes, times.step_s),
            store_bytes=sum(path.live_bytes for path in after.paths) or None,
            stalls=[stall.to_json() for stall in stalls_between(before.stalls, after.stalls)],
        )
        self.steps.append(metrics)
        self._times.append(times)
        if len(self.steps) > NUM_WARM_UP_STEPS:
            self._hits += after.prefetch_hits - before.prefetch_hits
            self._misses += after.prefetch_misses - before.prefetch_misses
        return metrics

    def _moved(self, facts: StepFacts) -> MovedBytes:
        """Returns what a whole step moved up to now, without what validation read.

        With updates under the next forward this is from the end of the updates before to the end
        of those that ran in this step, whenever that was.
        """
        since, now = self._since or facts.before.moved_by_steps, facts.after.moved_by_steps
        read_bytes = now.read_bytes - since.read_bytes - self._validation_bytes
        self._since = now
        self._validation_bytes = self._validation_read_bytes(facts)
        return MovedBytes(
            read_bytes=max(read_bytes, 0),
            write_bytes=now.write_bytes - since.write_bytes,
            cache_hit_bytes=now.cache_hit_bytes - since.cache_hit_bytes,
        )

    @staticmethod
    def _validation_read_bytes(facts: StepFacts) -> int:
        """Returns what validation used; the next step reads that again."""

        def used_bytes(stats: SessionStats) -> int:
            return stats.read_bytes - stats.ahead_read_bytes - stats.update_read_bytes

        return used_bytes(facts.validated) - used_bytes(facts.after)

    @property
    def prefetch_hit_rate(self) -> float | None:
        """Of the steps after the warm-up."""
        return ratio(self._hits, self._hits + self._misses)

    def raised(self, machine: Machine) -> tuple[Machine, float]:
        """Returns the machine with paths as fast as the steps show them to be, and by how much."""
        counted = self._counted()
        steps_s = list(itertools.compress((times.step_s for times in self._times), counted))

        def bounds_s(rates: Machine) -> list[float]:
            kept = itertools.compress(self.bounds(rates), counted)
            return [bound.step_s for bound in kept if bound is not None]

        return raised_to_steps(machine, steps_s, bounds_s)

    def micro_step(self, machine: Machine | None) -> ComputeTimes | None:
        """Returns the median passes of a micro-step without an update, after the warm-up.

        None where there are too few steps, or where updates run under backward, whose own time is
        not known then.
        """
        if self.overlap in ("backward", "both"):
            return None
        counted = itertools.compress(self._times, self._counted())
        micro_steps = [each for times in counted for each in self._compute(times, machine)]
        if not micro_steps:
            return None
        return ComputeTimes(
            forward_s=statistics.median(each.forward_s for each in micro_steps),
            backward_s=statistics.median(each.backward_s for each in micro_steps),
        )

    @property
    def other_s(self) -> float | None:
        """The median of what is neither pass nor update nor wait, of steps after the warm-up."""
        counted = list(itertools.compress(self._times, self._counted()))
        return statistics.median(times.other_busy_s for times in counted) if counted else None

    def _counted(self) -> list[bool]:
        """Returns which steps count in medians."""
        return [
            not step.skipped and number >= NUM_WARM_UP_STEPS
            for number, step in enumerate(self.steps)
        ]

    def rated(self, machine: Machine | None) -> list[StepMetrics]:
        """Returns the steps with the phases that the rates of `machine` show."""
        found = []
        for step, times, bound in zip(self.steps, self._times, self.bounds(machine), strict=True):
            phases = self._phases(times, bound)
            found.append(replace(step, **asdict(phases)))
        return found

    def bounds(self, machine: Machine | None) -> list[Bound | None]:
        """Returns the bounds of each step by the rates of `machine`."""
        return [self._bound(times, machine) for times in self._times]

    def _phases(self, times: StepTimes, bound: Bound | None) -> ExposedPhases:
        """Returns the phases; without a bound only the waits for updates count as exposed."""
        if bound is None or self.overlap == "none":
            return ExposedPhases(
                forward_s=times.forward_s, backward_s=times.backward_s, update_s=times.update_s
            )
        return exposed_phases(
            bound,
            overlap=self.overlap,
            forward=[_measured(span) for span in times.forward],
            backward=[_measured(span) for span in times.backward],
            update_s=times.own_update_s,
            reads_ahead=self.prefetched_bytes > 0,
        )

    def _note_plain_forwards(self, times: StepTimes) -> None:
        """Remembers how long a forward takes under which no update runs."""
        plain = times.forward[1:] if self._times else times.forward
        for span in plain:
            self._plain_forward_s = min(self._plain_forward_s, span.busy_s)

    def _bound(self, times: StepTimes, machine: Machine | None) -> Bound | None:
        if machine is None:
            return None
        return step_bound(
            machine,
            self.traffic,
            num_parameters=self.num_parameters,
            compute=self._compute(times, machine),
            overlap=self.overlap,
            prefetched_bytes=self.prefetched_bytes,
            shares_cores=self.shares_cores,
            link=self.link,
        )

    def _compute(self, times: StepTimes, machine: Machine | None) -> list[ComputeTimes]:
        """Returns how long the passes of each micro-step would have taken without an update."""
        compute = [
            ComputeTimes(forward_s=forward.busy_s, backward_s=backward.busy_s)
            for forward, backward in zip(times.forward, times.backward, strict=True)
        ]
        if machine is not None and self.overlap in ("forward", "both"):
            compute[0] = replace(compute[0], forward_s=self._forward_alone_s(times, machine))
        return compute

    def _forward_alone_s(self, times: StepTimes, machine: Machine) -> float:
        """Returns how long the first forward would have taken without the update under it.

        On shared cores it is longer by what the passes over records took, less what was waited
        for; and no longer than a forward was under which there was none.
        """
        forward_s = times.forward[0].busy_s
        if self.shares_cores:
            update = self.traffic.update
            memory_s = machine.memory_s(
                num_parameters=self.num_parameters,
                read_bytes=update.read_bytes,
                write_bytes=update.write_bytes,
            )
            waited_s = sum(span.busy_s for span in times.update)
            forward_s -= min(max(memory_s - waited_s, 0.0), forward_s)
        return min(forward_s, self._plain_forward_s)


def _measured(span: Span) -> MeasuredPass:
    return MeasuredPass(duration_s=span.duration_s, update_wait_s=span.update_wait_s)


def _per_day(num_bytes: int, step_s: float) -> float | None:
    return wear(bytes_per_step=num_bytes, step_s=step_s, endurance_bytes=None).bytes_per_day or None
