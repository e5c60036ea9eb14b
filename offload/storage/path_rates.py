"""What each path delivers now, from its counters: the figures that striping decides by.

[Note: busy intervals] Counters are looked at whenever a transfer is submitted. A path that has
bytes in flight at such a moment had some ever since the last one, as nothing was submitted in
between: it was busy for all of that interval, and the bytes that it moved say what it can do. That
has to hold for both directions: a path that only reads, or only writes, for want of the other moves
half of what it can do if it does both at a time, and more than its part if it does them in turns.
So where there are intervals with both, only these count.
Where nothing is in flight any more in one of them, when it ran dry is not known, and the interval
says only that the path can do at least as much.

[Note: both directions in one rate] Every record that is read is written again, so over a step each
path moves about as much in as out, whatever share of the records it has; the bytes of both over the
time in which it was busy are comparable between paths, and equal times mean that all end together.
The two directions apart are not: reads that wait behind writes look slow, and bursts after a pause
look fast.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.sizes import MIB

_LEAST_MEMORY_BYTES = 64 * MIB
_STALL_MEMORY_S = 5.0
"""What was measured is forgotten after this much busy time too, so that a path that stands still
falls back."""
_LEAST_BOTH = 0.05
"""Of the busy time that is remembered; where both directions are seldom busy at a time, as in the
first step, which only writes, one of them has to do."""
_LEAST_WINDOW_S = 0.03
"""Transfers are counted piece by piece: over less time than a few pieces take, no piece or one is
nothing or a multiple of the rate."""
_CLEARLY_FASTER = 2.0
"""An interval in which a path ran dry counts from here on: below, it may be chance."""


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
                so many bytes what was measured before counts for 1/e.
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
            return self._paths[path_index].queued

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
            memory_bytes = max(self._live_bytes(index), _LEAST_MEMORY_BYTES)
            path.look(elapsed_s, memory_bytes=memory_bytes)


class _Path:
    """What one path was given and has done."""

    def __init__(self, counters: Callable[[], Moved]) -> None:
        self._counters = counters
        self.submitted = [0, 0]  # to be read, to be written
        self._seen: tuple[int, int] | None = None
        self._start = (0, 0)  # of the counters when the store was opened
        self._both = _Recent()  # while both directions were busy
        self._any = _Recent()  # while one of them was
        self._window = _Window()

    @property
    def queued(self) -> int:
        return sum(self._queued())

    def _queued(self) -> list[int]:
        """Returns what is submitted and not done: to be read, and to be written."""
        seen = self._start if self._seen is None else self._seen
        return [
            max(submitted - (done - start), 0)
            for submitted, done, start in zip(self.submitted, seen, self._start, strict=True)
        ]

    def look(self, elapsed_s: float, *, memory_bytes: int) -> None:
        moved = self._counters()
        now = (moved.read_bytes, moved.write_bytes)
        if self._seen is None:
            self._seen = self._start = now
            return
        were_queued = self._queued()
        delta = sum(now) - sum(self._seen)
        self._seen = now
        if elapsed_s <= 0:
            return
        queued = self._queued()
        window = self._window
        window.bytes += delta
        window.seconds += elapsed_s
        if any(were_queued) and any(queued):
            window.any_bytes += delta
            window.any_s += elapsed_s
        if all(were_queued) and all(queued):
            window.both_bytes += delta
            window.both_s += elapsed_s
        if window.seconds >= _LEAST_WINDOW_S:
            self._end_window(window, memory_bytes)
            self._window = _Window()

    def _end_window(self, window: "_Window", memory_bytes: int) -> None:
        if not window.bytes and not window.any_s:
            return
        rate = self.rate()
        kept = math.exp(-window.bytes / memory_bytes - window.any_s / _STALL_MEMORY_S)
        if rate is None or window.bytes / window.seconds > _CLEARLY_FASTER * rate:
            self._any.add(window.bytes, window.seconds, kept=kept)
        elif window.any_s:
            self._any.add(window.any_bytes, window.any_s, kept=kept)
        if window.both_s:
            self._both.add(window.both_bytes, window.both_s, kept=kept)
        else:  # what time in one direction moves says nothing of both, but makes it older
            self._both.fade(math.exp(-window.seconds / _STALL_MEMORY_S))

    def rate(self) -> float | None:
        """Returns bytes/s of both directions together."""
        if self._both.busy_s >= _LEAST_BOTH * self._any.busy_s:
            return self._both.rate()
        return self._any.rate()


@dataclass(slots=True)
class _Window:
    """What a path did in a stretch of time that is long against a piece."""

    bytes: int = 0
    seconds: float = 0.0
    any_bytes: int = 0  # in intervals at whose ends it was busy in a direction
    any_s: float = 0.0
    both_bytes: int = 0  # in both
    both_s: float = 0.0


class _Recent:
    """Bytes and busy time, of which what is older counts for less."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._bytes = 0.0

    def add(self, num_bytes: int, seconds: float, *, kept: float) -> None:
        self.fade(kept)
        self._bytes += num_bytes
        self.busy_s += seconds

    def fade(self, kept: float) -> None:
        self._bytes *= kept
        self.busy_s *= kept

    def rate(self) -> float | None:
        return self._bytes / self.busy_s if self.busy_s else None
