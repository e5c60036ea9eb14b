"""When something that happens every so many steps, or every so often, is due."""

import time
from collections.abc import Callable

from offload.sizes import parse_duration


class Interval:
    """Counts in steps or in time, as the configuration says.

    Steps are counted from the run's first, so that a resumed run keeps its rhythm; time from the
    last occurrence in this process.
    """

    def __init__(self, every: int | str, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Stores its arguments.

        Args:
            every: Steps (0: never), or a time such as `"10min"`.
            clock_s: Monotonic seconds.
        """
        self._steps = every if isinstance(every, int) else 0
        self._seconds = parse_duration(every) if isinstance(every, str) else None
        self._clock_s = clock_s
        self._last_s = clock_s()

    def is_due(self, step: int) -> bool:
        """Returns whether it is to happen at the end of step `step`, from 1."""
        if self._seconds is not None:
            return self._clock_s() - self._last_s >= self._seconds
        return self._steps > 0 and step % self._steps == 0

    def happened(self) -> None:
        """Says that it did; the time starts anew."""
        self._last_s = self._clock_s()
