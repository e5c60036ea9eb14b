"""What of an update stays exposed where passes run at the same time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.plan.bound import Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPass:
    """Wall time of one forward or backward."""

    duration_s: float
    """Without `update_wait_s`."""
    update_wait_s: float = 0.0
    """For which it did nothing but wait for updates."""

    @property
    def wall_s(self) -> float:
        return self.duration_s + self.update_wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedPhases:
    """The passes of a step without what its update added to them, and the update with that."""

    forward_s: float
    backward_s: float
    update_s: float


def exposed_phases(
    bound: Bound,
    *,
    overlap: str,
    forward: Sequence[MeasuredPass],
    backward: Sequence[MeasuredPass],
    update_s: float,
    reads_ahead: bool = False,
) -> ExposedPhases:
    """Returns the phases of a measured step such that `update_s` compares with `Bound.update_s`.

    That bound is what an update adds at least to the passes that it runs under. So what it did add
    is that by which they took longer than they would at least without it: they waited for it,
    their reads queued behind its transfers, and it computed on their cores. In other passes it is
    the waits for it. The sum of the three phases stays what it was.

    Args:
        bound: Of this step.
        overlap: As for `step_bound`.
        forward: One entry for each micro-step, as `backward`.
        backward: One entry for each micro-step.
        update_s: The update's own phase, after the passes.
        reads_ahead: Whether records are read in the first micro-step's backward.
    """
    last = len(forward) - 1
    carries_forward = overlap in ("forward", "both")
    carries_backward = {last} if overlap in ("backward", "both") else set[int]()
    if overlap == "forward" and reads_ahead:
        carries_backward.add(0)

    def added(
        passes: Sequence[MeasuredPass], least_s: Iterator[float], carrying: set[int]
    ) -> float:
        return sum(
            max(each.wall_s - alone_s, 0.0) if index in carrying else each.update_wait_s
            for index, (each, alone_s) in enumerate(zip(passes, least_s, strict=True))
        )

    in_forward_s = added(
        forward, (alone[0] for alone in bound.passes), {0} if carries_forward else set()
    )
    in_backward_s = added(backward, (alone[1] for alone in bound.passes), carries_backward)
    return ExposedPhases(
        forward_s=sum(each.wall_s for each in forward) - in_forward_s,
        backward_s=sum(each.wall_s for each in backward) - in_backward_s,
        update_s=update_s + in_forward_s + in_backward_s,
    )
