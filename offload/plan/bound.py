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
    overlap: str = "none",
    prefetched_bytes: int = 0,
    shares_cores: bool = True,
) -> Bound:
    """Returns the bounds of a step, and of what an update adds to it.

    Args:
        machine: Rates measured in the same run.
        traffic: Bytes of the step.
        num_parameters: P: parameters that the fused pass covers.
        compute: One entry for each micro-step, without what the update takes of it.
        overlap: `none`: passes one after the other, then the update. `forward`: the update runs
            under the first micro-step's forward.
        prefetched_bytes: Q: records that are read in the first micro-step's backward, with
            `forward`.
        shares_cores: Whether the passes compute on the cores on which the update does.
    """
    passes = [
        _micro_step_s(machine, moved, times)
        for moved, times in zip(traffic.micro_steps, compute, strict=True)
    ]
    if overlap == "none":
        update_s = update_bound_s(machine, traffic, num_parameters=num_parameters)
        return Bound(step_s=sum(passes) + update_s, update_s=update_s)
    moved, times, update = traffic.micro_steps[0], compute[0], traffic.update
    ahead = min(prefetched_bytes, update.state_bytes)
    forward_io_s = machine.transfer_s(
        read_bytes=moved.forward_read_bytes + update.read_bytes - ahead,
        write_bytes=update.write_bytes,
    )
    memory_s = machine.memory_s(
        num_parameters=num_parameters,
        read_bytes=update.read_bytes,
        write_bytes=update.write_bytes,
    )
    cores_s = times.forward_s + memory_s if shares_cores else max(times.forward_s, memory_s)
    first_s = max(forward_io_s, cores_s) + max(
        times.backward_s, _backward_io_s(machine, moved, more_read_bytes=ahead)
    )
    step_s = first_s + sum(passes[1:])
    return Bound(step_s=step_s, update_s=step_s - sum(passes))


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
    backward_s = _backward_io_s(machine, moved)
    return max(times.forward_s, forward_s) + max(times.backward_s, backward_s)


def _backward_io_s(machine: Machine, moved: MicroStepTraffic, *, more_read_bytes: int = 0) -> float:
    return machine.transfer_s(
        read_bytes=moved.backward_read_bytes + moved.gradient_read_bytes + more_read_bytes,
        write_bytes=moved.gradient_write_bytes,
    )
