"""What each path delivers now, from its counters: the figures that striping decides by.

[Note: busy intervals] Counters are looked at whenever a transfer is submitted. A path that has
bytes in flight at such a moment had some ever since the last one, as nothing was submitted in
between: it was busy for all of that interval, and the bytes that it moved say what it can do. Where
nothing is in flight any more, when it ran dry is not known, and the interval says only that the
path can do at least as much.

[Note: both directions in one rate] Every record that is read is written again, so over a step each
path moves about as much in as out, whatever share of the records it has; the bytes of both over the
time in which it was busy are comparable between paths, and equal times mean that all end together.
The two directions apart are not: reads that wait behind writes look slow, and bursts after a pause
look fast. A path that reads and writes at the same time, each at its own rate, moves half of what
it could while only one direction has anything to do. So time in which both were in flight decides
where there was enough of it: else a path that lacks writes for a moment looks slow, gets less, and
lacks more.

[Note: no faster than one direction] Where one direction always has something queued and the other
comes in bursts, the bursts may pass at any rate: what throttles a path lets it catch up after a
pause. The time in which both were in flight is then that of the bursts, and short. But bytes come
back no faster than they go in either direction while that one is in flight, and a direction that
always is shows what the path can do.
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
_CLEARLY_FASTER = 2.0
"""An interval in which a path ran dry counts from here on: below, it may be chance."""
_ENOUGH_OF_BOTH = 1 / 8
"""Of the busy time that is remembered: from here on the time in which both directions were in
flight stands for all."""


class Moved(Protocol):
    """Counters of bytes that the kernel has moved."""

    @property
    def read_bytes(self) -> int: ...
    @property
    def write_bytes(self) -> int: ...


class PathRates:
    """Recent rates and queues of all paths of a store.

    Concurrency: Any thread.
    """

    def __init__(
        self,
        counters: Sequence[Callable[[], Moved]],
        *,
        live_bytes: Callable[[int], int] = lambda _: 0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stores its arguments.

        Args:
            counters: Gives the counters of each path since its engine was opened.
            live_bytes: What a path holds: in a step about as much goes in, and out again. After
                such a step what was measured before counts for 1/e.
            clock_s: Monotonic seconds.
        """
        self._lock = threading.Lock()
        self._clock_s = clock_s
        self._live_bytes = live_bytes
        self._paths = [_Path(read) for read in counters]
        self._last_s: float | None = None

    def note(self) -> None:
        """Looks at the counters; called before anything is submitted."""
        with self._lock:
            self._note()

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
        with self._lock:
            rate = self._paths[path_index].rate()
            return None if rate is None else rate / 2

    def _note(self) -> None:
        now_s = self._clock_s()
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        for index, path in enumerate(self._paths):
            memory_bytes = max(2 * self._live_bytes(index), _LEAST_MEMORY_BYTES)
            path.look(elapsed_s, memory_bytes=memory_bytes)


class _Mean:
    """Bytes over time, of which the past counts less and less."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self.seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes += num_bytes
        self.seconds += seconds

    def fade(self, kept: float) -> None:
        self._bytes *= kept
        self.seconds *= kept

    def rate(self) -> float | None:
        return self._bytes / self.seconds if self.seconds else None


class _Path:
    """What one path was given and has done; pairs are of reads and writes."""

    def __init__(self, counters: Callable[[], Moved]) -> None:
        self._counters = counters
        self.submitted = [0, 0]
        self._seen: tuple[int, int] | None = None
        self._start = (0, 0)  # of the counters when the store was opened
        self._any = _Mean()
        self._both = _Mean()
        self._each = (_Mean(), _Mean())

    def queued(self) -> tuple[int, int]:
        read, written = self._seen or self._start
        return (
            max(self.submitted[0] - (read - self._start[0]), 0),
            max(self.submitted[1] - (written - self._start[1]), 0),
        )

    def look(self, elapsed_s: float, *, memory_bytes: int) -> None:
        moved = self._counters()
        now = (moved.read_bytes, moved.write_bytes)
        if self._seen is None:
            self._seen = self._start = now
            return
        before = self.queued()
        moved_bytes = [a - b for a, b in zip(now, self._seen, strict=True)]
        delta = sum(moved_bytes)
        self._seen = now
        after = self.queued()
        if not any(before) or elapsed_s <= 0:
            return
        rate = self.rate()
        is_faster = rate is None or delta / elapsed_s > _CLEARLY_FASTER * rate
        if not any(after) and not is_faster:
            return
        kept = math.exp(-delta / memory_bytes - elapsed_s / _STALL_MEMORY_S)
        for mean in (self._any, self._both, *self._each):
            mean.fade(kept)
        self._any.add(delta, elapsed_s)
        if all(before) and all(after):
            self._both.add(delta, elapsed_s)
        for mean, num_bytes, at_start, at_end in zip(
            self._each, moved_bytes, before, after, strict=True
        ):
            if at_start and at_end:
                mean.add(num_bytes, elapsed_s)

    def rate(self) -> float | None:
        """Returns bytes/s of both directions together."""
        if self._both.seconds <= _ENOUGH_OF_BOTH * self._any.seconds:
            return self._any.rate()
        each = [rate for mean in self._each if (rate := mean.rate()) is not None]
        both = self._both.rate()
        return None if both is None else min(both, *(2 * rate for rate in each))
