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
    passes: tuple[tuple[float, float], ...]
    """The least times of each micro-step's forward and backward if they carried no update."""


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
            under the first micro-step's forward; `backward`: under the last one's backward; `both`:
            under these two.
        prefetched_bytes: Q: records that are read in the first micro-step's backward, with
            `forward`.
        shares_cores: Whether the passes compute on the cores on which the update does.
    """
    passes = tuple(
        _passes_s(machine, moved, times)
        for moved, times in zip(traffic.micro_steps, compute, strict=True)
    )
    passes_s = sum(forward_s + backward_s for forward_s, backward_s in passes)
    if overlap == "none":
        update_s = update_bound_s(machine, traffic, num_parameters=num_parameters)
        return Bound(step_s=passes_s + update_s, update_s=update_s, passes=passes)
    carried = _carried_by(
        machine,
        traffic,
        compute,
        overlap=overlap,
        ahead_bytes=min(prefetched_bytes, traffic.update.state_bytes),
        memory_s=machine.memory_s(
            num_parameters=num_parameters,
            read_bytes=traffic.update.read_bytes,
            write_bytes=traffic.update.write_bytes,
        ),
        shares_cores=shares_cores,
    )
    return Bound(step_s=passes_s + carried, update_s=carried, passes=passes)


def _carried_by(
    machine: Machine,
    traffic: StepTraffic,
    compute: Sequence[ComputeTimes],
    *,
    overlap: str,
    ahead_bytes: int,
    memory_s: float,
    shares_cores: bool,
) -> float:
    """Returns what an update adds to the passes that it runs under."""
    first, last, update = traffic.micro_steps[0], traffic.micro_steps[-1], traffic.update
    forward_s, backward_s = compute[0].forward_s, compute[-1].backward_s
    forward_bytes = first.forward_read_bytes
    backward_bytes = last.backward_read_bytes + last.gradient_read_bytes
    spilled_bytes = last.gradient_write_bytes

    def phase_s(compute_s: float, read_bytes: int, write_bytes: int) -> float:
        io_s = machine.transfer_s(
            read_bytes=read_bytes + update.read_bytes - ahead_bytes,
            write_bytes=write_bytes + update.write_bytes,
        )
        return max(io_s, compute_s + memory_s if shares_cores else max(compute_s, memory_s))

    alone_forward_s = max(forward_s, machine.transfer_s(read_bytes=forward_bytes, write_bytes=0))
    alone_backward_s = max(
        backward_s, machine.transfer_s(read_bytes=backward_bytes, write_bytes=spilled_bytes)
    )
    if overlap == "backward":
        return phase_s(backward_s, backward_bytes, spilled_bytes) - alone_backward_s
    if overlap == "both":
        both_s = phase_s(forward_s + backward_s, forward_bytes + backward_bytes, spilled_bytes)
        return max(both_s - alone_forward_s - alone_backward_s, 0.0)
    with_ahead_s = max(
        compute[0].backward_s, _backward_io_s(machine, first, more_read_bytes=ahead_bytes)
    )
    without_s = max(compute[0].backward_s, _backward_io_s(machine, first))
    return phase_s(forward_s, forward_bytes, 0) - alone_forward_s + with_ahead_s - without_s


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


def _passes_s(
    machine: Machine, moved: MicroStepTraffic, times: ComputeTimes
) -> tuple[float, float]:
    """Returns the least times of one micro-step's forward and backward, without an update."""
    forward_s = machine.transfer_s(read_bytes=moved.forward_read_bytes, write_bytes=0)
    backward_s = _backward_io_s(machine, moved)
    return max(times.forward_s, forward_s), max(times.backward_s, backward_s)


def _backward_io_s(machine: Machine, moved: MicroStepTraffic, *, more_read_bytes: int = 0) -> float:
    return machine.transfer_s(
        read_bytes=moved.backward_read_bytes + moved.gradient_read_bytes + more_read_bytes,
        write_bytes=moved.gradient_write_bytes,
    )
