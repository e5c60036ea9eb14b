"""How often each pass of a micro-step reads a unit: by the order of uses and the slots alone."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from offload.layout import ModelLayout
from offload.plan.keeping import Keeping

After = Literal["update", "backward", "forward"]
"""What a forward follows: the first of a step, a later micro-step's, one after a validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """The end of a call that holds a unit in forward; other uses end as the next one begins."""

    unit: int
    num_before: int
    """Uses that began before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """The units that a micro-step uses, by their indices, in order; some more than once.

    A call uses its unit once, whatever calls inside it use that too.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    ends: tuple[CallEnd, ...] = ()
    """Of the calls of forward, in order."""

    @property
    def carried(self) -> int | None:
        """The unit that is in use as a backward ends and the next forward begins, if it is one."""
        is_one = bool(self.forward and self.backward) and self.forward[0] == self.backward[-1]
        return self.forward[0] if is_one else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """How often each unit is read in a micro-step, by its index."""

    forward: Counter[int]
    backward: Counter[int]
    forward_again: Counter[int]
    """Of a forward that follows another one, as the first after a validation does."""
    carried: int | None = None
    """The unit that the forwards after the first find where the backward before left it."""

    def kept_forward_bytes(self, layout: ModelLayout, after: After = "update") -> int:
        """Returns by how much a forward reads less than each unit once; negative where more.

        Args:
            layout: Of the model.
            after: What the forward follows.
        """
        reads = self.forward_again if after == "forward" else self.forward
        if after == "backward" and self.carried is not None:
            reads = reads - Counter([self.carried])
        return _kept_bytes(layout, reads)

    def kept_backward_bytes(self, layout: ModelLayout) -> int:
        """Returns the same of a backward."""
        return _kept_bytes(layout, self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class UseStep:
    """The beginning of a use.

    Attributes:
        place: Among the uses of forward and then backward.
        is_read: Whether the unit is in no slot then.
        held: Units that the calls around this use hold.
    """

    place: int
    unit: int
    is_read: bool
    held: frozenset[int]


def reads_of(uses: Uses, num_slots: int, *, tiled: Collection[int] = ()) -> Reads:
    """Returns what is read as slots are given: as by `offload.streaming.residency`.

    After its use a unit stays where it is among the next units, as many as there are slots.

    Args:
        uses: Of a micro-step.
        num_slots: Slots for units.
        tiled: Units that no slot holds as a whole: each pass that uses one reads it once.
    """
    forward = Counter(set(uses.forward).intersection(tiled))
    backward = Counter(set(uses.backward).intersection(tiled))
    for step in steps_of(uses, num_slots, tiled=tiled):
        if step.is_read:
            (backward if step.place >= len(uses.forward) else forward)[step.unit] += 1
    first, again = len(uses.forward), Counter(set(uses.forward).intersection(tiled))
    for step in steps_of(_twice(uses), num_slots, tiled=tiled):
        if step.is_read and first <= step.place < 2 * first:
            again[step.unit] += 1
    carried = uses.carried if num_slots and uses.carried not in tiled else None
    return Reads(forward=forward, backward=backward, forward_again=again, carried=carried)


def steps_of(uses: Uses, num_slots: int, *, tiled: Collection[int] = ()) -> Iterator[UseStep]:
    """Goes through the uses of a micro-step; see `reads_of`.

    A tile takes a slot as a unit does, but does not stay.
    """
    keeping, order = Keeping(num_slots=num_slots), (*uses.forward, *uses.backward)
    ends: dict[int, list[int]] = {}
    for end in uses.ends:
        ends.setdefault(end.num_before, []).append(end.unit)
    calls = _calls(uses)
    present, held = set[int](), list[int]()
    in_use: int | None = None  # outside a call
    for place, unit in enumerate(order):
        for ended in ends.get(place, ()):
            held.remove(ended)
            if not keeping.stays(ended, order[place:], held=held):
                present.discard(ended)
        if in_use is not None and not keeping.stays(in_use, order[place:], held=held):
            present.discard(in_use)
        is_tiled = unit in tiled
        yield UseStep(
            place=place,
            unit=unit,
            is_read=unit not in present and not is_tiled,
            held=frozenset(held),
        )
        in_use = None
        if place in calls:
            held.append(unit)
        elif not is_tiled:
            in_use = unit
        if not is_tiled:
            present.add(unit)


def _twice(uses: Uses) -> Uses:
    """Returns the uses of a forward, of another one, and of the backward."""
    num_uses = len(uses.forward)
    again = (CallEnd(unit=end.unit, num_before=end.num_before + num_uses) for end in uses.ends)
    return Uses(forward=uses.forward * 2, backward=uses.backward, ends=(*uses.ends, *again))


def _calls(uses: Uses) -> set[int]:
    """Returns the places of the uses of forward that are calls."""
    found: set[int] = set()
    last: dict[int, int] = {}
    num_seen = 0
    for end in uses.ends:
        for place in range(num_seen, end.num_before):
            last[uses.forward[place]] = place
        num_seen = end.num_before
        found.add(last[end.unit])
    return found


def _kept_bytes(layout: ModelLayout, reads: Counter[int]) -> int:
    return sum(
        (1 - reads[index]) * sum(placed.facts.num_bytes for placed in unit.parameters())
        for index, unit in enumerate(layout.units)
    )
