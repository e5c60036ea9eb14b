"""How often each pass of a micro-step reads a unit: by the order of uses and the slots alone."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from offload.layout import ModelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """The units that a micro-step uses, by their indices, in order; some more than once."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def without(self, units: Collection[int]) -> "Uses":
        """Returns the uses of all units but these."""
        return Uses(
            forward=tuple(unit for unit in self.forward if unit not in units),
            backward=tuple(unit for unit in self.backward if unit not in units),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """How often each unit is read in a micro-step, by its index."""

    forward: Counter[int]
    backward: Counter[int]

    def kept_forward_bytes(self, layout: ModelLayout) -> int:
        """Returns by how much a forward reads less than each unit once; negative where more."""
        return _kept_bytes(layout, self.forward)

    def kept_backward_bytes(self, layout: ModelLayout) -> int:
        """Returns the same of a backward."""
        return _kept_bytes(layout, self.backward)


def reads_of(uses: Uses, num_slots: int, *, tiled: Collection[int] = ()) -> Reads:
    """Returns what is read as slots are given: as by `offload.streaming.residency`.

    After its use a unit stays where it is among the next units, as many as there are slots.

    Args:
        uses: Of a micro-step.
        num_slots: Slots for units, without those that calls hold beside the unit in use.
        tiled: Units that no slot holds as a whole: each pass that uses one reads it once.
    """
    whole = uses.without(tiled)
    order = (*whole.forward, *whole.backward)
    next_use = _next_uses(order)
    forward = Counter(set(uses.forward).intersection(tiled))
    backward = Counter(set(uses.backward).intersection(tiled))
    present: set[int] = set()
    for place, unit in enumerate(order):
        if unit not in present:
            (backward if place >= len(whole.forward) else forward)[unit] += 1
        following = next_use[place]
        stays = following < len(order) and len(set(order[place + 1 : following])) < num_slots
        (present.add if stays else present.discard)(unit)
    return Reads(forward=forward, backward=backward)


def _next_uses(order: Sequence[int]) -> list[int]:
    """Returns for each place that of the same unit's next use; the end where there is none."""
    found, later = [len(order)] * len(order), dict[int, int]()
    for place in reversed(range(len(order))):
        found[place] = later.get(order[place], len(order))
        later[order[place]] = place
    return found


def _kept_bytes(layout: ModelLayout, reads: Counter[int]) -> int:
    return sum(
        (1 - reads[index]) * sum(placed.facts.num_bytes for placed in unit.parameters())
        for index, unit in enumerate(layout.units)
    )
