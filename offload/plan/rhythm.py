"""What happens between the steps of a run, and what the step that follows reads more for it.

An update under the next forward fills the slots of the units that are used first. Something that
needs every update to be over before, as a commit does, leaves fewer of them for that forward, and a
validation none.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

_MOST_STEPS = 1 << 12
Before = Literal["step", "commit", "validation"]
"""What a step begins after: nothing but the step before, a commit or checkpoint, a validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Every how many steps something follows one; 0: never, or by the clock."""

    validation: int = 0
    commits: tuple[int, ...] = ()
    """Of commits and of checkpoints."""
    more_read_bytes: Mapping[Before, int] = field(default_factory=dict)
    """Of a step after each of these, beyond those of the run's traffic."""

    @property
    def is_even(self) -> bool:
        """Whether all steps read the same."""
        return len({self.more_read_bytes.get(kind, 0) for kind in self.kinds}) <= 1

    def before(self, step: int) -> Before:
        """Returns what `step`, from 1, begins after."""
        last = step - 1
        if self.validation and last % self.validation == 0:
            return "validation"
        return "commit" if any(every and last % every == 0 for every in self.commits) else "step"

    @property
    def kinds(self) -> set[Before]:
        """What steps of a long run begin after."""
        return {self.before(step) for step in self._period()}

    def mean_more_bytes(self, steps: Iterable[int] | None = None) -> int:
        """Returns what a step reads more on average.

        Args:
            steps: Over these; None: over a long run.
        """
        numbers = self._period() if steps is None else steps
        more = [self.more_read_bytes.get(self.before(step), 0) for step in numbers]
        return round(sum(more) / len(more)) if more else 0

    def _period(self) -> range:
        """Returns steps after which all begins anew, or so many that more make no difference."""
        period = math.lcm(*(every for every in (self.validation, *self.commits) if every))
        return range(2, min(period, _MOST_STEPS) + 2)
