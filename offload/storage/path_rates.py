"""What each path delivers now, from its counters: the figures that striping decides by.

[Note: both directions in one rate] Every record that is read is written again, so over a step each
path moves about as much in as out, whatever share of the records it has; the bytes of both over the
time in which it had any to move are comparable between paths, and equal times mean that all end
together. The two directions apart are not: reads that wait behind writes look slow, and bursts
after a pause look fast. A path that reads and writes at the same time, each at its own rate, moves
half of what it could while only one direction has anything to do. So time in which both were in
flight decides where there was enough of it: else a path that lacks writes for a moment looks slow,
gets less, and lacks more.

[Note: no faster than one direction] Where one direction always has something queued and the other
comes in bursts, the bursts may pass at any rate: what throttles a path lets it catch up after a
pause. The time in which both were in flight is then that of the bursts, and short. But bytes come
back no faster than they go in either direction while that one is in flight, and a direction that
always is shows what the path can do.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from offload.sizes import MIB

_LEAST_MEMORY_BYTES = 64 * MIB
_STALL_MEMORY_S = 10.0
"""What was measured is forgotten after this much busy time too, so that a path that stands still
falls back."""
_ENOUGH_OF_BOTH = 1 / 8
"""Of the busy time that is remembered: from here on the time in which both directions were in
flight stands for all."""


class Moved(Protocol):
    """Counters of a path: bytes that the kernel has moved, and how long it had some to move."""

    @property
    def read_bytes(self) -> int: ...
    @property
    def write_bytes(self) -> int: ...
    @property
    def both_bytes(self) -> int: ...
    @property
    def in_flight_s(self) -> float: ...
    @property
    def read_in_flight_s(self) -> float: ...
    @property
    def write_in_flight_s(self) -> float: ...


class PathRates:
    """Recent rates and queues of all paths of a store.

    Concurrency: Any thread.
    """

    def __init__(
        self,
        counters: Sequence[Callable[[], Moved]],
        *,
        live_bytes: Callable[[int], int] = lambda _: 0,
        limits: Sequence[float | None] = (),
    ) -> None:
        """Stores its arguments.

        Args:
            counters: Gives the counters of each path since its engine was opened.
            live_bytes: What a path holds: in a step about as much goes in, and out again. After
                such a step what was measured before counts for 1/e.
            limits: Bytes/s of both directions together that a path is held to before its counters:
                what waits for its turn there is not in flight.
        """
        self._lock = threading.Lock()
        self._live_bytes = live_bytes
        self._paths = [_Path(read) for read in counters]
        self._limits = [*limits, *[None] * (len(self._paths) - len(limits))]

    def note(self) -> None:
        """Looks at the counters; called before anything is submitted."""
        with self._lock:
            for index, path in enumerate(self._paths):
                path.look(max(2 * self._live_bytes(index), _LEAST_MEMORY_BYTES))

    def submitted(self, path_index: int, num_bytes: int, *, is_write: bool) -> None:
        """Says what was submitted to a path."""
        with self._lock:
            self._paths[path_index].submitted[is_write] += num_bytes

    def queued_bytes(self, path_index: int) -> int:
        """Returns what is submitted and not done, both ways."""
        with self._lock:
            return sum(self._paths[path_index].queued())

    def queued_write_bytes(self, path_index: int) -> int:
        """Returns what of this is to be written."""
        with self._lock:
            return self._paths[path_index].queued()[1]

    def round_trip_bytes_per_s(self, path_index: int) -> float | None:
        """Returns how many bytes go in and out again each second, None where nothing is known."""
        limit = self._limits[path_index]
        with self._lock:
            rate = self._paths[path_index].rate()
        if rate is None:
            return None
        return (rate if limit is None else min(rate, limit)) / 2


class _Mean:
    """Bytes over time, of which the past counts less and less."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self.seconds = 0.0

    def add(self, num_bytes: int, seconds: float, *, kept: float) -> None:
        self._bytes = self._bytes * kept + num_bytes
        self.seconds = self.seconds * kept + seconds

    def rate(self) -> float | None:
        return self._bytes / self.seconds if self.seconds else None


class _Path:
    """What one path was given and has done; pairs are of reads and writes."""

    def __init__(self, counters: Callable[[], Moved]) -> None:
        self._counters = counters
        self.submitted = [0, 0]
        self._seen: Moved | None = None
        self._start = (0, 0)  # of the counters when the store was opened
        self._any = _Mean()
        self._both = _Mean()
        self._each = (_Mean(), _Mean())

    def queued(self) -> tuple[int, int]:
        if self._seen is None:
            return self.submitted[0], self.submitted[1]
        return (
            max(self.submitted[0] - (self._seen.read_bytes - self._start[0]), 0),
            max(self.submitted[1] - (self._seen.write_bytes - self._start[1]), 0),
        )

    def look(self, memory_bytes: int) -> None:
        now, before = self._counters(), self._seen
        self._seen = now
        if before is None:
            self._start = (now.read_bytes, now.write_bytes)
            return
        moved = (now.read_bytes - before.read_bytes, now.write_bytes - before.write_bytes)
        seconds = (
            now.read_in_flight_s - before.read_in_flight_s,
            now.write_in_flight_s - before.write_in_flight_s,
        )
        busy_s = now.in_flight_s - before.in_flight_s
        kept = math.exp(-sum(moved) / memory_bytes - busy_s / _STALL_MEMORY_S)
        self._any.add(sum(moved), busy_s, kept=kept)
        both_s = max(sum(seconds) - busy_s, 0.0)
        self._both.add(now.both_bytes - before.both_bytes, both_s, kept=kept)
        for mean, num_bytes, in_flight_s in zip(self._each, moved, seconds, strict=True):
            mean.add(num_bytes, in_flight_s, kept=kept)

    def rate(self) -> float | None:
        """Returns bytes/s of both directions together."""
        both = self._both.rate()
        if both is None or self._both.seconds <= _ENOUGH_OF_BOTH * self._any.seconds:
            return self._any.rate()
        each = [mean.rate() for mean in self._each]
        return min(both, *(2 * rate for rate in each if rate is not None))
