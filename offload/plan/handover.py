"""Which parameters go from their update into a slot: the next forward does not read them."""

from collections.abc import Collection

from offload.layout import ModelLayout
from offload.plan.keeping import Keeping
from offload.plan.uses import Uses, steps_of
from offload.policy import resolve_order


def records_under_forward(
    layout: ModelLayout, order: str, overlap: str, num_cached: int
) -> frozenset[str]:
    """Returns the names of the records that are updated under the next forward.

    With `both` these are the ones that memory keeps: the others are updated in backward.
    """
    records = layout.records
    if overlap == "both":
        kept = resolve_order(order).kept(len(records), num_cached, step=1)
        return frozenset(records[index].name for index in kept)
    return frozenset(record.name for record in records if overlap == "forward")


def handed_over(
    layout: ModelLayout,
    num_slots: int,
    *,
    records: Collection[str],
    uses: Uses | None = None,
    tiled: Collection[str] = (),
    is_finished_at_once: bool = False,
) -> frozenset[str]:
    """Returns the names of the subgroups whose updates find their unit's slot.

    A record is updated when the first of its units is asked for, at the latest. By then those after
    it have slots too, as many as there are.

    Args:
        layout: Of the model.
        num_slots: Slots for units.
        records: Names of those that are updated under the forward.
        uses: Of a micro-step; None: forward uses each unit once, in the order of the layout.
        tiled: Names of units that no slot holds as a whole.
        is_finished_at_once: Whether something waits for all updates before the forward, as a
            commit does: then only units that had a slot before are handed over.
    """
    if uses is None:
        uses = Uses(forward=tuple(range(len(layout.units))), backward=())
    numbers = {shard.name: n for n, unit in enumerate(layout.units) for shard in unit.shards}
    wide = {n for n, unit in enumerate(layout.units) if unit.name in tiled}
    places = _first_places(uses)
    slotted = _slotted_from(uses, num_slots, wide)
    found: set[str] = set()
    for record in layout.records:
        if record.name not in records:
            continue
        parts = [(numbers[s.shard], s.name) for s in record.subgroups]
        parts = [(unit, name) for unit, name in parts if unit in places]
        first = 0 if is_finished_at_once else min((places[u] for u, _ in parts), default=0)
        slots = slotted.get(first, set()) - wide
        found.update(name for unit, name in parts if unit in slots)
    return frozenset(found)


def _first_places(uses: Uses) -> dict[int, int]:
    """Returns where in the order of uses each unit of forward is used first."""
    found: dict[int, int] = {}
    for place, unit in enumerate(uses.forward):
        found.setdefault(unit, place)
    return found


def _slotted_from(uses: Uses, num_slots: int, tiled: Collection[int]) -> dict[int, set[int]]:
    """Returns the units that have slots by the time of each use of forward, by its place."""
    keeping, order = Keeping(num_slots=num_slots), (*uses.forward, *uses.backward)
    steps = steps_of(uses, num_slots, tiled=tiled)
    return {
        step.place: keeping.staying(order[step.place :], held=step.held)
        for step in steps
        if step.place < len(uses.forward)
    }


def handed_over_bytes(layout: ModelLayout, names: Collection[str]) -> int:
    """Returns the parameter bytes of the named subgroups, without gaps and padding."""
    return sum(
        (min(placed.stop, subgroup.stop) - max(placed.start, subgroup.start)) * subgroup.itemsize
        for record in layout.records
        for subgroup in record.subgroups
        if subgroup.name in names
        for placed in layout.parameters_in(subgroup)
    )
