"""How fast a run writes its drives to the end of their rated life."""

from collections.abc import Sequence
from dataclasses import dataclass

_S_PER_DAY = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What a run writes. None where it is not known."""

    bytes_per_step: int
    """To all drives, commits included in proportion."""
    bytes_per_day: float | None
    drive_days: float | None
    """Until the drive that is written most reaches its rated endurance."""


def wear(
    *,
    bytes_per_step: int,
    step_s: float | None,
    endurance_bytes: int | None,
    shares: Sequence[float] = (1.0,),
) -> Wear:
    """Returns what a run writes.

    Args:
        bytes_per_step: To all drives.
        step_s: Time of a step, where it is known.
        endurance_bytes: What each drive may be written in its life, where that is given.
        shares: The part of the bytes that each drive gets.
    """
    per_day = bytes_per_step / step_s * _S_PER_DAY if step_s else None
    days = None
    if per_day and endurance_bytes is not None:
        days = endurance_bytes / (per_day * max(shares, default=1.0))
    return Wear(bytes_per_step=bytes_per_step, bytes_per_day=per_day, drive_days=days)
