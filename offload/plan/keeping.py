"""Which units stay in their slots when their use ends: the engine's rule, and its plans'. Pure.

[Note: what stays]
A unit stays if all that is used until its next use fits into the slots beside it. So what stays
takes no slot that a fetch ahead needs, and what is read follows from the order of uses and the
slots alone, however far ahead units are fetched. A rule that reads less, such as giving up the
farthest next use whenever a slot is needed, would depend on when that is.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Decides what stays among so many slots. See [Note: what stays]."""

    num_slots: int

    def staying(self, following: Iterable[int], *, held: Iterable[int] = ()) -> set[int]:
        """Returns the units that stay if their use ends now: the next ones, one for each slot.

        Args:
            following: The units of the uses to come, soonest first; repeated ones count once.
            held: Units that calls hold. They stay, and take one slot each whatever comes next.
        """
        found = set(held)
        following = iter(following)
        while (num_left := self.num_slots - len(found)) > 0:
            more = set(itertools.islice(following, num_left))
            if not more:
                break
            found |= more
        return found

    def stays(self, unit: int, following: Iterable[int], *, held: Iterable[int] = ()) -> bool:
        """Tells whether `unit` is one of `staying`."""
        return unit in self.staying(following, held=held)
