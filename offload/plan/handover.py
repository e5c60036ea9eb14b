"""Which parameters go from their update into a slot, so that the next forward reads them not."""

from collections.abc import Collection

from offload.layout import ModelLayout
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
    tiled: Collection[str] = (),
    is_finished_at_once: bool = False,
) -> frozenset[str]:
    """Returns the names of the subgroups whose updates find their unit's slot.

    A record is updated when the first of its units is asked for, at the latest. By then those after
    it have slots too, as many as there are.

    Args:
        layout: Of the model; its units are in the order in which forward uses them.
        num_slots: Slots for units, without those that calls hold beside the unit in use.
        records: Names of those that are updated under the forward.
        tiled: Names of units that no slot holds as a whole.
        is_finished_at_once: Whether something waits for all updates before the forward, as a
            commit does: then only units that had a slot before are handed over.
    """
    whole = [unit for unit in layout.units if unit.name not in tiled]
    place_of = {shard.name: place for place, unit in enumerate(whole) for shard in unit.shards}
    found: set[str] = set()
    for record in layout.records:
        if record.name not in records:
            continue
        placed = [(place_of[s.shard], s.name) for s in record.subgroups if s.shard in place_of]
        first = 0 if is_finished_at_once else min((place for place, _ in placed), default=0)
        found.update(name for place, name in placed if place - first < num_slots)
    return frozenset(found)


def handed_over_bytes(layout: ModelLayout, names: Collection[str]) -> int:
    """Returns the parameter bytes of the named subgroups, without gaps and padding."""
    return sum(
        (min(placed.stop, subgroup.stop) - max(placed.start, subgroup.start)) * subgroup.itemsize
        for record in layout.records
        for subgroup in record.subgroups
        if subgroup.name in names
        for placed in layout.parameters_in(subgroup)
    )
