"""The least time of a simulated step: its bytes and its compute at the machine's rates."""

from offload.plan.bound import ComputeTimes, step_bound
from offload.plan.machine import Machine
from offload.plan.simulation import SimulatedStep
from offload.plan.systems import SystemRun
from offload.plan.traffic import MicroStepTraffic, StepTraffic, UpdateTraffic


def least_step_s(
    system: SystemRun, rates: Machine, step: SimulatedStep, *, shares_cores: bool
) -> float:
    """Returns the bound of a step that moved the bytes of `step`.

    Args:
        system: What was simulated.
        rates: Of one node.
        step: The simulated step.
        shares_cores: Whether passes compute on the cores on which updates do.
    """
    units, overlap = system.work.units, system.policy["overlap"]
    compute = ComputeTimes(
        forward_s=sum(unit.forward_s for unit in units),
        backward_s=sum(unit.backward_s for unit in units),
    )
    return step_bound(
        rates,
        _traffic(system, step),
        num_parameters=system.layout.trainable_elements,
        compute=[compute] * system.work.micro_steps,
        overlap=overlap,
        prefetched_bytes=_most_read_ahead(system) if overlap == "forward" else 0,
        shares_cores=shares_cores,
        link=system.link,
        other_s=system.work.other_s,
    ).step_s


def _traffic(system: SystemRun, step: SimulatedStep) -> StepTraffic:
    """Returns the bytes of the step: those of passes from the work, the rest is the update's."""
    work = system.work
    pieces = [piece for record in work.records for piece in record.pieces]
    stored = sum(p.num_bytes for p in pieces) + sum(unit.frozen_bytes for unit in work.units)
    kept = {number for number, unit in enumerate(work.units) if unit.is_kept}
    kept_bytes = sum(p.num_bytes for p in pieces if p.unit in kept)
    kept_bytes += sum(work.units[number].frozen_bytes for number in kept)
    handed_over = sum(piece.num_bytes for piece in pieces if piece.is_handed_over)
    spilled = sum(record.spilled_bytes for record in work.records)
    micro_steps = tuple(
        MicroStepTraffic(
            forward_read_bytes=stored - (0 if number else handed_over),
            backward_read_bytes=stored - kept_bytes,
            gradient_read_bytes=spilled if number else 0,
            gradient_write_bytes=spilled,
        )
        for number in range(work.micro_steps)
    )
    written = sum(piece.num_bytes for piece in pieces)
    in_passes = StepTraffic(
        micro_steps=micro_steps,
        update=UpdateTraffic(
            state_bytes=0,
            parameter_read_bytes=0,
            parameter_write_bytes=written,
            gradient_read_bytes=spilled,
        ),
    )
    state = max(step.write_bytes - in_passes.write_bytes, 0)
    return StepTraffic(
        micro_steps=micro_steps,
        update=UpdateTraffic(
            state_bytes=state,
            parameter_read_bytes=max(step.read_bytes - in_passes.read_bytes - state, 0),
            parameter_write_bytes=written,
            gradient_read_bytes=spilled,
        ),
    )


def _most_read_ahead(system: SystemRun) -> int:
    record_bytes = max(record.state_bytes for record in system.work.records)
    return system.make_policy().window.num_buffers * record_bytes
