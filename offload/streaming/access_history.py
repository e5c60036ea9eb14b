"""What was accessed in order, and what came next when it was last like now. Pure: no torch, no I/O.

[Note: the history is followed]
A loop repeats itself, but nobody says where a repetition begins: a step may have several forwards
or micro-steps and evaluations in between, every second step may be another, and there may be no
update at all. So all accesses are one history, and the present is followed in it: while it goes as
it went then, what comes next is what came next then. Where it departs, the prediction goes on from
the place before which most was as it is now. A loop is foreseen once it was seen, whatever it is
made of.
"""

import copy
import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

NEVER = 1 << 62
"""The next use of a unit that the prediction does not hold."""

_MOST_ACCESSES = 1 << 15
"""Then the older half is forgotten: some MB, and steps of half as many are foreseen."""
_MOST_ALIKE = 8
"""Accesses in which two places are compared."""
_MOST_PLACES = 256
"""The latest of a unit that are compared with the present: all take longer with every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One use of a unit."""

    unit: int
    is_backward: bool
    is_evaluation: bool = False
    """In a pass that autograd does not record."""


@functools.cache
def access_of(unit: int, *, is_backward: bool, is_evaluation: bool = False) -> Access:
    """Returns the one object that stands for all uses of this kind: they are recorded often."""
    return Access(unit=unit, is_backward=is_backward, is_evaluation=is_evaluation)


UPDATE = Access(unit=-1, is_backward=False)
"""The end of a step, which nothing is fetched across: parameters change."""


class AccessHistory:
    """Accesses in order, and a cursor at what is predicted to be the next.

    See [Note: the history is followed].
    """

    def __init__(self) -> None:
        self._accesses = [UPDATE]
        self._positions = {UPDATE.unit: [0]}
        self._cursor = 1
        # What `upcoming` has found since the last access, as far as it was asked.
        self._upcoming: Iterator[int] | None = None

    @property
    def last(self) -> Access:
        return self._accesses[-1]

    def add(self, access: Access) -> bool:
        """Appends `access` and moves the prediction on; returns whether another was predicted."""
        accesses, cursor = self._accesses, self._cursor
        expected = accesses[cursor] if cursor < len(accesses) else None
        is_expected = expected is access or expected == access
        self._upcoming = None
        accesses.append(access)
        self._positions.setdefault(access.unit, []).append(len(accesses) - 1)
        self._cursor = (cursor if is_expected else self._most_alike()) + 1
        if len(accesses) > _MOST_ACCESSES:
            self._forget(len(accesses) // 2)
        return expected is not None and not is_expected

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units that are predicted before the next update, soonest first.

        Who adds an access meanwhile asks anew.
        """
        if self._upcoming is None:
            (self._upcoming,) = itertools.tee(self._find_upcoming(), 1)
        return copy.copy(self._upcoming)

    def _find_upcoming(self) -> Iterator[int]:
        accesses, seen = self._accesses, set[int]()
        for position in range(self._cursor, len(accesses)):
            unit = accesses[position].unit
            if unit == UPDATE.unit:
                return
            if unit not in seen:
                seen.add(unit)
                yield unit
                if len(seen) == len(self._positions) - 1:
                    return  # every unit: a history without updates is long

    def next_use(self, unit: int) -> int:
        """Returns the position of the next predicted access of `unit`, or `NEVER`."""
        position = self._next(unit)
        return position if position < self._next(UPDATE.unit) else NEVER

    def _next(self, unit: int) -> int:
        positions = self._positions.get(unit, [])
        index = bisect_left(positions, self._cursor)
        return positions[index] if index < len(positions) else NEVER

    def _most_alike(self) -> int:
        """Returns the place of an earlier access like the last one; the last one's if none is.

        Of the latest of its unit, `_MOST_PLACES`. Where several are as much like it, what comes
        soonest after what was expected, else the latest: a pass that leaves something out goes on
        behind it.
        """
        last, cursor = len(self._accesses) - 1, self._cursor
        places = [
            place
            for place in self._positions[self.last.unit][-1 - _MOST_PLACES : -1]
            if self._accesses[place] == self.last
        ]

        def likeness(place: int) -> tuple[int, bool, int]:
            is_ahead = place >= cursor
            return self._num_alike(place), is_ahead, -place if is_ahead else place

        return max(places, key=likeness, default=last)

    def _num_alike(self, place: int) -> int:
        """Returns how many accesses up to `place` are those up to the last one."""
        last = len(self._accesses) - 1
        for count in range(min(place + 1, _MOST_ALIKE)):
            if self._accesses[place - count] != self._accesses[last - count]:
                return count
        return min(place + 1, _MOST_ALIKE)

    def _forget(self, num_accesses: int) -> None:
        """Forgets the oldest; what was predicted from there is predicted no more."""
        del self._accesses[:num_accesses]
        cursor = self._cursor - num_accesses
        self._cursor = cursor if cursor >= 0 else len(self._accesses)
        self._positions = {UPDATE.unit: []}
        for position, access in enumerate(self._accesses):
            self._positions.setdefault(access.unit, []).append(position)
