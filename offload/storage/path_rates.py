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

[Note: steadily busy] For the same reason a path that was idle for a moment may look faster than it
is: it would be given more, look slower, and be given less, step by step. What it moves once it has
been busy for longer than such bursts last is what counts, where there is enough of that.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from offload.sizes import MIB

_LEAST_MEMORY_BYTES = 64 * MIB
_STALL_MEMORY_S = 10.0
"""What was measured is forgotten after this much busy time too, so that a path that stands still
falls back."""
_ENOUGH = 1 / 8
"""Of the busy time that is remembered: from here on the time in which both directions were in
flight, or the path was steadily busy, stands for all."""
_BURST_S = 0.1
"""A path that has been busy for so long has caught up: it moves what it moves for good."""
_CLOCKS_DIFFER_S = 1e-3


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
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stores its arguments.

        Args:
            counters: Gives the counters of each path since its engine was opened.
            live_bytes: What a path holds: in a step about as much goes in, and out again. After
                such a step what was measured before counts for 1/e.
            limits: Bytes/s of both directions together that a path is held to before its counters:
                what waits for its turn there is not in flight.
            clock_s: Monotonic seconds.
        """
        self._lock = threading.Lock()
        self._live_bytes = live_bytes
        self._clock_s = clock_s
        self._paths = [_Path(read) for read in counters]
        self._limits = [*limits, *[None] * (len(self._paths) - len(limits))]

    def note(self) -> None:
        """Looks at the counters; called before anything is submitted."""
        with self._lock:
            for index, path in enumerate(self._paths):
                memory_bytes = max(2 * self._live_bytes(index), _LEAST_MEMORY_BYTES)
                path.look(self._clock_s(), memory_bytes=memory_bytes)

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


class _Delta:
    """What counters say of the time between two looks; pairs are of reads and writes."""

    def __init__(self, before: Moved, now: Moved) -> None:
        self.moved = (now.read_bytes - before.read_bytes, now.write_bytes - before.write_bytes)
        self.seconds = (
            now.read_in_flight_s - before.read_in_flight_s,
            now.write_in_flight_s - before.write_in_flight_s,
        )
        self.busy_s = now.in_flight_s - before.in_flight_s
        self.both_bytes = now.both_bytes - before.both_bytes
        self.both_s = max(sum(self.seconds) - self.busy_s, 0.0)


class _Means:
    """What a path does both ways, in both at once, and in either."""

    def __init__(self) -> None:
        self._any = _Mean()
        self._both = _Mean()
        self._each = (_Mean(), _Mean())

    @property
    def busy_s(self) -> float:
        return self._any.seconds

    def fade(self, kept: float) -> None:
        for mean in (self._any, self._both, *self._each):
            mean.add(0, 0.0, kept=kept)

    def add(self, delta: _Delta) -> None:
        self._any.add(sum(delta.moved), delta.busy_s, kept=1.0)
        self._both.add(delta.both_bytes, delta.both_s, kept=1.0)
        for mean, num_bytes, seconds in zip(self._each, delta.moved, delta.seconds, strict=True):
            mean.add(num_bytes, seconds, kept=1.0)

    def rate(self) -> float | None:
        """Returns bytes/s of both directions together."""
        both = self._both.rate()
        if both is None or self._both.seconds <= _ENOUGH * self._any.seconds:
            return self._any.rate()
        each = [mean.rate() for mean in self._each]
        return min(both, *(2 * rate for rate in each if rate is not None))


class _Path:
    """What one path was given and has done."""

    def __init__(self, counters: Callable[[], Moved]) -> None:
        self._counters = counters
        self.submitted = [0, 0]  # to be read, to be written
        self._seen: Moved | None = None
        self._seen_s = 0.0
        self._start = (0, 0)  # of the counters when the store was opened
        self._steady_s = 0.0  # since it last ran dry
        self._all = _Means()
        self._steady = _Means()

    def queued(self) -> tuple[int, int]:
        if self._seen is None:
            return self.submitted[0], self.submitted[1]
        return (
            max(self.submitted[0] - (self._seen.read_bytes - self._start[0]), 0),
            max(self.submitted[1] - (self._seen.write_bytes - self._start[1]), 0),
        )

    def look(self, now_s: float, *, memory_bytes: int) -> None:
        before, elapsed_s = self._seen, now_s - self._seen_s
        self._seen, self._seen_s = self._counters(), now_s
        if before is None:
            self._start = (self._seen.read_bytes, self._seen.write_bytes)
            return
        delta = _Delta(before, self._seen)
        kept = math.exp(-sum(delta.moved) / memory_bytes - delta.busy_s / _STALL_MEMORY_S)
        for means in (self._all, self._steady):
            means.fade(kept)
        self._all.add(delta)
        if self._steady_s >= _BURST_S:
            self._steady.add(delta)
        ran_dry = elapsed_s - delta.busy_s > _CLOCKS_DIFFER_S
        self._steady_s = 0.0 if ran_dry else self._steady_s + elapsed_s

    def rate(self) -> float | None:
        """Returns bytes/s of both directions together."""
        is_steady = self._steady.busy_s > _ENOUGH * self._all.busy_s
        return (self._steady if is_steady else self._all).rate()
