"""Names in messages."""

from collections.abc import Sequence

from offload.sizes import format_size
from offload.streaming.unit import StreamedUnit

_MOST_NAMES = 8


def listed(names: Sequence[str]) -> str:
    """Returns the first few of `names` in backticks, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
    left = len(names) - _MOST_NAMES
    return f"{shown} and {left} more" if left > 0 else shown


def no_slot_message(
    unit: StreamedUnit, units: Sequence[StreamedUnit], num_slots: int, *, tier: str
) -> str:
    """Says why there is no slot for `unit`: who holds and who keeps `units`."""
    held = ", ".join(f"`{u.name}` ({u.num_holds} holds)" for u in units if u.num_holds)
    kept = ", ".join(f"`{name}`" for u in units for name in u.kept_names)
    num_that_move = sum(not u.is_wide for u in units)
    remedy = f"raise `tiers.{tier}.memory`"
    if num_slots >= num_that_move:  # no budget gives more
        remedy = "clone what is kept: there is a slot for each unit already"
    return (
        f"cannot fetch unit `{unit.name}` ({format_size(unit.layout.num_bytes)}): all "
        f"{num_slots} slots are taken; held: {held or 'none'}; other slots are "
        f"kept by {f'whoever keeps {kept}, or ' if kept else ''}tensors that still point into "
        "them (views of parameters that were kept); "
        f"drop those, or {remedy}"
    )
