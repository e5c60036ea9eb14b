"""What a run reports at its end."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offload.plan.bound import Bound
from offload.runs.metrics import StepMetrics

NUM_WARM_UP_STEPS = 2
"""Steps of the process that the medians leave out: they record the trace and fill caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of `offload train`; None where a figure does not apply.

    Times and bytes of a step are medians over the steps after the second of this process; with
    order `alternating` bytes are the mean of those of odd and of even steps, and where steps after
    a commit or a validation read more, bytes are means over the steps.
    """

    run_dir: str | None
    """None where it is removed again."""
    store: str | None
    steps: int
    """Steps done in all, those before a resume too."""
    first_step: int
    """Of this process, from 1."""
    stopped_by: str | None
    """The signal that ended the run before its last step."""
    skipped_steps: int
    loss: float | None
    losses: list[float]
    validation_loss_before: float | None
    validation_loss_after: float | None
    state_digest: str
    parameters: int
    state_bytes: int
    host_budget_bytes: int | None
    host_peak_bytes: int | None
    device_budget_bytes: int | None
    device_peak_bytes: int | None
    rss_baseline_bytes: int
    rss_peak_bytes: int
    activation_peak_bytes: int
    activation_offload_bytes_per_step: int | None
    """Of saved activations that were moved to host memory or storage."""
    activation_hit_rate: float | None
    """The part of those that were there when backward asked for them."""
    commit_bytes: int
    read_bytes_per_step: int | None
    write_bytes_per_step: int | None
    formula_read_bytes_per_step: int
    formula_write_bytes_per_step: int
    step_s: float | None
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    other_s: float | None
    io_wait_s: float | None
    bound_s: float | None
    achieved_over_bound: float | None
    path_rate_factor: float | None
    """How much faster than probed the paths were, so that steps do not beat their bound; 1: not."""
    update_bound_s: float | None
    update_achieved_over_bound: float | None
    """None where updates run under passes: what is exposed of one is no part of its bound."""
    prefetch_hit_rate: float | None
    tokens_per_s: float | None
    commit_s: float | None
    """Median time for which training stood still for a commit."""
    recovery_s: float
    """From the start of this process's part to its first step."""
    expected_lost_work_s: float | None
    """What a failure costs on average: a commit, half the time between two, and the recovery."""
    best_commit_interval_s: float | None
    """Between commits, so that commits and lost work cost least (Young/Daly)."""
    best_commit_every: int | None
    """The same in steps."""
    written_bytes_per_day: float | None
    """To all paths, commits included."""
    drive_days: float | None
    """Until the path that is written most reaches `tiers.storage.endurance`."""
    others_cpu_share: float | None
    """The part of the cores' time that other processes took during the steps; None: not known."""
    torch_threads: int
    """Of this process. Passes on the CPU may give other bits with another number."""
    stalls: list[dict[str, Any]]
    """Waits of the calling thread in the whole run, longest first; as in `metrics.jsonl`."""
    store_planned_bytes: int | None
    """Of the store when it is largest, by the plan."""
    store_peak_bytes: int | None
    """Most bytes in blocks that versions and checkpoints needed after a step."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMedians:
    """Medians over the steps after the warm-up, None where there are none."""

    read_bytes: int | None
    write_bytes: int | None
    activation_offload_bytes: int | None
    step_s: float | None
    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    other_s: float | None
    io_wait_s: float | None
    bound_s: float | None
    update_bound_s: float | None
    tokens_per_s: float | None

    @staticmethod
    def of(
        steps: Sequence[StepMetrics],
        bounds: Sequence[Bound | None],
        *,
        in_turns: bool = False,
        kind_of: Callable[[int], str] | None = None,
    ) -> "StepMedians":
        """Returns the medians over `steps` of one process, in order; skipped ones don't count.

        Args:
            steps: Of one process, in order.
            bounds: Those of each.
            in_turns: Whether odd and even steps move other bytes.
            kind_of: Gives the kind of a step, where each kind reads other bytes.
        """
        pairs = zip(steps[NUM_WARM_UP_STEPS:], bounds[NUM_WARM_UP_STEPS:], strict=True)
        kept = [(step, bound) for step, bound in pairs if not step.skipped]
        measured = [step for step, _ in kept]
        known = [bound for _, bound in kept if bound is not None]
        return StepMedians(
            read_bytes=typical_bytes([s.read_bytes for s in measured], in_turns=in_turns)
            if kind_of is None
            else _mean_of_kinds({s.step: s.read_bytes for s in measured}, kind_of),
            write_bytes=typical_bytes([s.write_bytes for s in measured], in_turns=in_turns),
            activation_offload_bytes=_whole(
                _median(step.activation_offload_bytes for step in measured)
            ),
            step_s=_median(step.step_s for step in measured),
            forward_s=_median(step.forward_s for step in measured),
            backward_s=_median(step.backward_s for step in measured),
            update_s=_median(step.update_s for step in measured),
            other_s=_median(step.other_s for step in measured),
            io_wait_s=_median(step.io_wait_s for step in measured),
            bound_s=_median(bound.step_s for bound in known),
            update_bound_s=_median(bound.update_s for bound in known),
            tokens_per_s=_median(step.tokens_per_s for step in measured),
        )


def measured_steps(steps: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Returns those of a process that its medians are over: neither warm-up nor skipped."""
    return [step for step in steps[NUM_WARM_UP_STEPS:] if not step.skipped]


def typical_bytes(values: Sequence[int], *, in_turns: bool) -> int | None:
    """Returns the median of the bytes of successive steps; None without any.

    Args:
        values: Of each step.
        in_turns: Whether odd and even steps move other bytes: then it is the mean of the median of
            either, so that it does not depend on how many steps there are.
    """
    turns = [values[::2], values[1::2]] if in_turns else [values]
    medians = [statistics.median(each) for each in turns if each]
    return round(statistics.mean(medians)) if medians else None


def _mean_of_kinds(bytes_of_steps: Mapping[int, int], kind_of: Callable[[int], str]) -> int | None:
    """Returns the mean over steps, of which each counts as the median of its kind."""
    kinds: dict[str, list[int]] = {}
    for step, num_bytes in bytes_of_steps.items():
        kinds.setdefault(kind_of(step), []).append(num_bytes)
    total = sum(statistics.median(each) * len(each) for each in kinds.values())
    return round(total / len(bytes_of_steps)) if bytes_of_steps else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Returns the quotient, or None where a side is missing or the denominator is 0."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
