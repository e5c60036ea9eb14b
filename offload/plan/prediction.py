"""What a step of a planned run will take: a simulation under the run's own policy."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from offload.layout import ModelLayout
from offload.plan.bound import ComputeTimes, step_bound
from offload.plan.device import DevicePlan
from offload.plan.gradients import spilled_sizes
from offload.plan.host import HostPlan, Placement
from offload.plan.link import LinkTraffic
from offload.plan.machine import Machine
from offload.plan.simulated_update import WindowSize, window_of
from offload.plan.simulation import SimulatedMachine, SimulatedPolicy, SimulatedStep, simulate
from offload.plan.traffic import StepTraffic
from offload.plan.wear import wear
from offload.plan.work import PassTimes, StepWork, work_of
from offload.policy import resolve_order, resolve_overlap, resolve_striping


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The policy of a run, by name."""

    parameters: Placement
    optimizer: Placement
    order: str
    overlap: str
    striping: str
    prefetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step will take. None where it is not known."""

    step: SimulatedStep | None = None
    bound_s: float | None = None
    rss_peak_bytes: int | None = None
    activation_bytes: int | None = None
    """Contained in the peak: saved tensors, logits and loss."""
    written_bytes_per_day: float | None = None
    tokens_to_hide_io: int | None = None


def predict_step(
    layout: ModelLayout,
    host: HostPlan | None,
    traffic: StepTraffic,
    choices: Choices,
    *,
    machine: Machine,
    passes: Sequence[PassTimes],
    other_s: float = 0.0,
    record_s: float = 0.0,
    tokens: int = 0,
    handed_over: Collection[str] = (),
    kept: Collection[str] = (),
    carried: str | None = None,
    shares_cores: bool = True,
    link: LinkTraffic | None = None,
    device: DevicePlan | None = None,
) -> Prediction:
    """Returns the times of a step in steady state.

    Args:
        layout: Of the model.
        host: How the host budget is cut; None where everything is in ordinary memory.
        traffic: Bytes of a step by the formula.
        choices: The run's policy.
        machine: Its rates; without paths where nothing is stored.
        passes: Of each unit in one micro-step.
        other_s: Of a step, what is neither pass nor update.
        record_s: Of an update, for each record, beside the fused pass.
        tokens: Of a step.
        handed_over: Names of the subgroups whose updates find their unit's slot.
        kept: Names of the units that a backward finds in their slots, or does not ask for.
        carried: Name of the unit that forwards after the first find in its slot.
        shares_cores: Whether passes compute on the cores on which updates do.
        link: Bytes of a step over the link to a device; None where there is none.
        device: How the device's budget is cut; None where it has no memory of its own.
    """
    micro_steps = len(traffic.micro_steps)
    work = work_of(
        layout,
        parameters=choices.parameters,
        optimizer=choices.optimizer,
        passes=passes,
        micro_steps=micro_steps,
        other_s=other_s,
        record_s=record_s,
        spilled=spilled_sizes(layout, host.gradients) if host else None,
        link=link,
        handed_over=handed_over,
        kept=kept,
        carried=carried,
    )
    simulated = SimulatedMachine(rates=machine, shares_cores=shares_cores)
    step = simulate(work, simulated, _policy(layout, host, device, choices))
    bound_s = None
    if machine.paths or machine.link:
        bound_s = step_bound(
            machine,
            traffic,
            num_parameters=layout.trainable_elements,
            compute=[_sum_of(passes)] * micro_steps,
            overlap=choices.overlap,
            prefetched_bytes=host.prefetched_bytes if host else 0,
            shares_cores=shares_cores,
            link=link,
        ).step_s
    worn = wear(bytes_per_step=traffic.write_bytes, step_s=step.step_s, endurance_bytes=None)
    return Prediction(
        step=step,
        bound_s=bound_s,
        written_bytes_per_day=worn.bytes_per_day,
        tokens_to_hide_io=_tokens_to_hide_io(work, traffic, machine, tokens),
    )


def _sum_of(passes: Sequence[PassTimes]) -> ComputeTimes:
    return ComputeTimes(
        forward_s=sum(each.forward_s for each in passes),
        backward_s=sum(each.backward_s for each in passes),
    )


def _policy(
    layout: ModelLayout, host: HostPlan | None, device: DevicePlan | None, choices: Choices
) -> SimulatedPolicy:
    slots = device or host
    return SimulatedPolicy(
        order=resolve_order(choices.order),
        striping=resolve_striping(choices.striping),
        window=window_of(host) if host else WindowSize(num_buffers=1),
        overlap=resolve_overlap(choices.overlap),
        updates_in_backward=choices.overlap in ("backward", "both"),
        num_slots=(slots.num_slots if slots else 0) or len(layout.units),
        num_staged=host.num_slots if host and device and host.num_slots else None,
        prefetch_distance=choices.prefetch,
    )


def _tokens_to_hide_io(
    work: StepWork, traffic: StepTraffic, machine: Machine, tokens: int
) -> int | None:
    """Tokens of a step whose passes take as long as all of its transfers, were they hidden.

    More tokens in each micro-step lengthen the passes and move no more bytes.
    """
    passes_s = work.micro_steps * sum(unit.forward_s + unit.backward_s for unit in work.units)
    if not passes_s or not tokens:
        return None
    if not machine.paths:
        return 0
    transfer_s = machine.transfer_s(read_bytes=traffic.read_bytes, write_bytes=traffic.write_bytes)
    return round(tokens * transfer_s / passes_s)
