"""What a run itself shows of its paths: no machine is slower than what it did.

[Note: probes and bursts] A probe of a second or two does not meet every state of a drive. A
virtual disk that gives 1.3 GB/s each way after a pause, and half of that when it is kept busy, may
show the probe the one and the steps the other. A bound says what the machine can do; so where steps
are faster than the bound by the probed rates, these were too low, and are raised until the bound is
no more than what steps took. How long passes and kernels took is measured in the steps themselves
and stays.
"""

from collections.abc import Callable, Sequence

from offload.plan.machine import Machine

_MOST = 64.0
"""No probe is wrong by more: beyond it, something else than storage makes the difference."""
_ROUNDS = 40
"""Halvings of an interval of 64: far finer than any rate is known."""
_FASTER_SHARE = 0.25
"""Of the steps that may be faster than their bound: single ones are, by chance."""


def raised_to_steps(
    machine: Machine,
    steps_s: Sequence[float],
    bounds_s: Callable[[Machine], Sequence[float]],
) -> tuple[Machine, float]:
    """Returns the machine with faster paths, and by how much: 1.0 where it stays as it is.

    Args:
        machine: As probed.
        steps_s: Times of measured steps, without warm-up.
        bounds_s: Gives the bounds of these steps by the rates of a machine.
    """

    def is_beaten(factor: float) -> bool:
        bounds = bounds_s(machine.with_faster_paths(factor))
        faster = sum(s < b for s, b in zip(steps_s, bounds, strict=True))
        return faster > _FASTER_SHARE * len(steps_s)

    if not steps_s or not machine.paths or not is_beaten(1.0):
        return machine, 1.0
    low, high = 1.0, _MOST
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_beaten(middle) else (low, middle)
    return machine.with_faster_paths(high), high
