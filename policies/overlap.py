"""Which record is updated next while a pass runs, and which are read ahead of their update."""

from collections.abc import Collection, Container, Sequence

_NEVER = 1 << 62


class Forward:
    """Updates run under the next forward: each record before the first unit that needs it."""

    name = "forward"

    def sequence(self, units: Sequence[Sequence[int]], upcoming: Sequence[int]) -> Sequence[int]:
        """Returns the records by the place of their first unit in the pass to come.

        Units that it is not expected to reach come last; among equals the layout's order holds.
        """
        place = {unit: index for index, unit in enumerate(upcoming)}
        first = [min((place.get(unit, _NEVER) for unit in each), default=_NEVER) for each in units]
        return sorted(range(len(units)), key=lambda record: first[record])

    def choose(self, waiting: Sequence[int], needed: Collection[int]) -> int:
        """Returns the first record that the pass waits for now, or else the first of all."""
        if not needed:
            return waiting[0]
        return next((record for record in waiting if record in needed), waiting[0])

    def prefetched(
        self,
        sequence: Sequence[int],
        *,
        cached: Container[int],
        capacity: int,
        num_places: int,
    ) -> Sequence[int]:
        """Returns the first records of the sequence that are not in memory, and fit.

        They leave a place for what comes before one of them.
        """
        found = [record for record in sequence if record not in cached][:capacity]
        is_beginning = found == list(sequence[: len(found)])
        return found if is_beginning else found[: max(num_places - 1, 0)]


class Both(Forward):
    """What is not updated under backward is under the next forward."""

    name = "both"


OVERLAPS = {overlap.name: overlap for overlap in (Forward, Both)}
