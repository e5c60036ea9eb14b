"""The least time that a step can take with a policy's bytes on a machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.machine import Machine
from offload.plan.traffic import MicroStepTraffic, StepTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """Time of one micro-step's passes without the waits for storage in them."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds of one step and of the update in it."""

    step_s: float
    update_s: float


def step_bound(
    machine: Machine,
    traffic: StepTraffic,
    *,
    num_parameters: int,
    compute: Sequence[ComputeTimes],
) -> Bound:
    """Returns the bounds for overlap `none`: passes one after the other, then the update.

    Args:
        machine: Rates measured in the same run.
        traffic: Bytes of the step.
        num_parameters: P: parameters that the fused pass covers.
        compute: One entry for each micro-step.
    """
    update_s = update_bound_s(machine, traffic, num_parameters=num_parameters)
    passes_s = sum(
        _micro_step_s(machine, moved, times)
        for moved, times in zip(traffic.micro_steps, compute, strict=True)
    )
    return Bound(step_s=passes_s + update_s, update_s=update_s)


def update_bound_s(machine: Machine, traffic: StepTraffic, *, num_parameters: int) -> float:
    """Returns T_update: storage or memory, whichever takes longer."""
    update = traffic.update
    return max(
        machine.transfer_s(read_bytes=update.read_bytes, write_bytes=update.write_bytes),
        machine.memory_s(
            num_parameters=num_parameters,
            read_bytes=update.read_bytes,
            write_bytes=update.write_bytes,
        ),
    )


def _micro_step_s(machine: Machine, moved: MicroStepTraffic, times: ComputeTimes) -> float:
    forward_s = machine.transfer_s(read_bytes=moved.forward_read_bytes, write_bytes=0)
    backward_s = machine.transfer_s(
        read_bytes=moved.backward_read_bytes + moved.gradient_read_bytes,
        write_bytes=moved.gradient_write_bytes,
    )
    return max(times.forward_s, forward_s) + max(times.backward_s, backward_s)
