"""The least time that a step can take with a policy's bytes on a machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from offload.plan.link import LinkTraffic
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
    link: LinkTraffic | None = None,
    other_s: float = 0.0,
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
        link: Bytes over the link to a device; None where there is none.
        other_s: Of the step, between the last backward and the update, on the passes' cores.
    """
    phases = [
        each
        for number, (moved, times) in enumerate(zip(traffic.micro_steps, compute, strict=True))
        for each in _passes(moved, times, link=link, micro_step=number)
    ]
    if overlap != "none":  # what an update moves beside passes goes on meanwhile
        phases[-1] = replace(phases[-1], compute_s=phases[-1].compute_s + other_s)
    alone_s = [phase.least_s(machine, shares_cores=shares_cores) for phase in phases]
    update = _Phase(
        memory_s=machine.memory_s(
            num_parameters=num_parameters,
            read_bytes=traffic.update.read_bytes,
            write_bytes=traffic.update.write_bytes,
        ),
        read_bytes=traffic.update.read_bytes,
        write_bytes=traffic.update.write_bytes,
        in_bytes=link.update_in_bytes if link else 0,
    )
    update_s = _added_s(
        machine,
        phases,
        update,
        overlap=overlap,
        ahead_bytes=min(prefetched_bytes, traffic.update.state_bytes),
        shares_cores=shares_cores,
    )
    return Bound(
        step_s=sum(alone_s) + update_s + (other_s if overlap == "none" else 0.0),
        update_s=update_s,
        passes=tuple(zip(alone_s[::2], alone_s[1::2], strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """What can happen at the same time in a stretch of a step."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    """Of passes over records."""
    read_bytes: float = 0
    write_bytes: float = 0
    in_bytes: int = 0
    """Over the link to the device."""
    out_bytes: int = 0

    def __add__(self, other: "_Phase") -> "_Phase":
        return _Phase(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in _FIELDS}
        )

    def least_s(self, machine: Machine, *, shares_cores: bool) -> float:
        """Returns the longest of what it has."""
        on_cores_s = self.compute_s + self.memory_s
        return max(
            on_cores_s if shares_cores else max(self.compute_s, self.memory_s),
            self.transfer_s(machine),
            machine.link_s(in_bytes=self.in_bytes, out_bytes=self.out_bytes),
        )

    def transfer_s(self, machine: Machine) -> float:
        return machine.transfer_s(read_bytes=self.read_bytes, write_bytes=self.write_bytes)


_FIELDS = fields(_Phase)
_GOLDEN = (5**0.5 - 1) / 2
_SECTIONS = 40
"""Each leaves 0.62 of the rest: a billionth in all."""


def _passes(
    moved: MicroStepTraffic, times: ComputeTimes, *, link: LinkTraffic | None, micro_step: int
) -> tuple[_Phase, _Phase]:
    """Returns one micro-step's forward and backward."""
    in_bytes, out_bytes = link.gradients_in(micro_step) if link else (0, 0)
    forward = _Phase(
        compute_s=times.forward_s,
        read_bytes=moved.forward_read_bytes,
        in_bytes=link.parameters_in(micro_step) if link else 0,
    )
    backward = _Phase(
        compute_s=times.backward_s,
        read_bytes=moved.backward_read_bytes + moved.gradient_read_bytes,
        write_bytes=moved.gradient_write_bytes,
        in_bytes=in_bytes + (link.backward_in_bytes if link else 0),
        out_bytes=out_bytes,
    )
    return forward, backward


def _added_s(
    machine: Machine,
    phases: Sequence[_Phase],
    update: _Phase,
    *,
    overlap: str,
    ahead_bytes: int,
    shares_cores: bool,
) -> float:
    """Returns what an update adds to the passes that it runs under."""

    def least_s(*together: _Phase) -> float:
        return sum(together, _Phase()).least_s(machine, shares_cores=shares_cores)

    forward, backward = phases[0], phases[-1]
    if overlap == "none":
        return least_s(update)
    if overlap == "backward":
        return least_s(backward, update) - least_s(backward)
    if overlap == "both":
        return max(least_s(forward, backward, update) - least_s(forward) - least_s(backward), 0.0)
    others = sum(phases[1:], _Phase())
    others_s = sum(least_s(phase) for phase in phases[1:])

    def forward_s(read_ahead: float) -> float:
        rest = replace(update, read_bytes=update.read_bytes - read_ahead)
        return least_s(forward, rest)

    def later_s(read_ahead: float) -> float:
        # What is read ahead waits for whatever else the passes after that forward need.
        reads = replace(others, read_bytes=others.read_bytes + read_ahead)
        return max(reads.transfer_s(machine), others_s)

    return _least_sum(forward_s, later_s, ahead_bytes) - least_s(forward) - others_s


def _least_sum(
    falling: Callable[[float], float], rising: Callable[[float], float], most: float
) -> float:
    """Returns the least sum of two convex functions, from 0 to `most`, by golden sections."""
    if rising(most) <= rising(0.0):
        return falling(most) + rising(most)
    if falling(0.0) <= falling(most):
        return falling(0.0) + rising(0.0)

    def value(at: float) -> float:
        return falling(at) + rising(at)

    low, high = 0.0, most
    left, right = high - _GOLDEN * high, _GOLDEN * high
    at_left, at_right = value(left), value(right)
    for _ in range(_SECTIONS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return min(at_left, at_right, value(0.0), value(most))
