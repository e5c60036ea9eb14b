"""The recorded order of accesses, which tells what comes next. Pure: no torch, no I/O.

One trace is kept per mode (training, evaluation). While a pass runs its accesses are recorded;
the trace of the last pass of the same mode predicts them. An access that the prediction does not
hold is never wrong, only unforeseen: the prediction goes on from its next occurrence, or ends.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

NEVER = 1 << 62
"""The next use of a unit that the prediction does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One use of a unit."""

    unit: int
    is_backward: bool


@dataclass(slots=True, kw_only=True)
class Prediction:
    """A recorded trace and how far the current pass has followed it."""

    accesses: list[Access] = field(default_factory=list)
    cursor: int = 0
    positions: dict[int, list[int]] = field(default_factory=dict)


class AccessTrace:
    """Records the accesses of the current pass and predicts the next ones."""

    def __init__(self) -> None:
        self._last: dict[str, list[Access]] = {}
        self._mode = ""
        self._recording: list[Access] = []
        self._prediction = Prediction()
        self.divergences = 0
        self.num_passes = 0

    def begin(self, mode: str) -> None:
        """Ends the current pass and starts one of `mode`."""
        if self._recording:
            self._last[self._mode] = self._recording
        self._mode = mode
        self._recording = []
        self.num_passes += 1
        self.predict(mode)

    def predict(self, mode: str) -> None:
        """Predicts a pass of `mode` from its beginning, before it has begun."""
        current = self._recording if mode == self._mode and self._recording else None
        accesses = current or self._last.get(mode, [])
        positions: dict[int, list[int]] = {}
        for position, access in enumerate(accesses):
            positions.setdefault(access.unit, []).append(position)
        self._prediction = Prediction(accesses=accesses, positions=positions)

    def record(self, access: Access) -> None:
        """Records `access` and moves the prediction on.

        Backward asks for a unit once per saved weight: a run of these is one access.
        """
        if access.is_backward and self._recording and self._recording[-1] == access:
            return
        self._recording.append(access)
        prediction = self._prediction
        cursor = prediction.cursor
        if cursor < len(prediction.accesses) and prediction.accesses[cursor] == access:
            prediction.cursor += 1
            return
        if prediction.accesses:
            self.divergences += 1
        prediction.cursor = min(self.next_use(access.unit) + 1, len(prediction.accesses))

    def is_among_next(self, unit: int, count: int) -> bool:
        """Tells whether `unit` is one of the next `count` distinct units that are predicted."""
        return unit in itertools.islice(self.upcoming(), max(count, 0))

    def upcoming(self) -> Iterator[int]:
        """Yields the distinct units of the predicted accesses, soonest first."""
        prediction = self._prediction
        seen: set[int] = set()
        for position in range(prediction.cursor, len(prediction.accesses)):
            unit = prediction.accesses[position].unit
            if unit not in seen:
                seen.add(unit)
                yield unit

    def next_use(self, unit: int) -> int:
        """Returns the position of the next predicted access of `unit`, or `NEVER`."""
        positions = self._prediction.positions.get(unit, [])
        index = bisect_left(positions, self._prediction.cursor)
        return positions[index] if index < len(positions) else NEVER
