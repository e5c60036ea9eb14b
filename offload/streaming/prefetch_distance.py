"""How many units ahead fetches are started, from bytes and rates that were seen. Pure."""

import math

_KEEPS = 0.75
"""Share of what was seen before in each new estimate: a change is followed within some units."""


class PrefetchDistance:
    """Starts as many fetches ahead as it takes for a unit to come before it is asked for.

    While one unit is fetched, others are used. If units are used three times as fast as one fetch
    brings them, three have to be in flight, and one more so that none is late.
    """

    def __init__(self, *, least: int, most: int) -> None:
        """Stores its arguments.

        Args:
            least: Units, whatever is seen; 0 never fetches ahead.
            most: Units for which there is room.
        """
        self._least = least
        self._most = most
        self._fetch_bytes_per_s: float | None = None
        self._use_bytes_per_s: float | None = None

    @property
    def units(self) -> int:
        """Of now."""
        if not self._least or self._fetch_bytes_per_s is None or self._use_bytes_per_s is None:
            return self._least
        needed = math.ceil(self._use_bytes_per_s / self._fetch_bytes_per_s) + 1
        return max(self._least, min(needed, self._most))

    def note_fetch(self, num_bytes: int, *, within_s: float, was_late: bool) -> None:
        """Notes a fetch that took `within_s`, or less where it was not late."""
        if num_bytes == 0 or within_s <= 0:
            return
        rate = num_bytes / within_s
        known = self._fetch_bytes_per_s
        if was_late or (known is not None and rate > known):
            self._fetch_bytes_per_s = _blend(known, rate)

    def note_use(self, num_bytes: int, *, duration_s: float) -> None:
        """Notes that a unit was in use for `duration_s` before the next was asked for."""
        if num_bytes and duration_s > 0:
            self._use_bytes_per_s = _blend(self._use_bytes_per_s, num_bytes / duration_s)


def _blend(known: float | None, seen: float) -> float:
    return seen if known is None else _KEEPS * known + (1 - _KEEPS) * seen
