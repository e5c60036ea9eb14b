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
look fast.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from offload.sizes import MIB

_LEAST_MEMORY_BYTES = 64 * MIB
_STALL_MEMORY_S = 5.0
"""What was measured is forgotten after this much busy time too, so that a path that stands still
falls back."""
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

    def submitted(self, path_index: int, num_bytes: int) -> None:
        """Says what was submitted to a path."""
        with self._lock:
            self._paths[path_index].submitted += num_bytes

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
        self.submitted = 0
        self._seen: int | None = None
        self._start = 0  # of the counters when the store was opened
        self._bytes = 0.0
        self._busy_s = 0.0

    @property
    def queued(self) -> int:
        return max(self.submitted - ((self._seen or 0) - self._start), 0)

    def look(self, elapsed_s: float, *, memory_bytes: int) -> None:
        moved = self._counters()
        moved_bytes = moved.read_bytes + moved.write_bytes
        if self._seen is None:
            self._seen = self._start = moved_bytes
            return
        was_busy = self.queued > 0
        delta = moved_bytes - self._seen
        self._seen = moved_bytes
        if not was_busy or elapsed_s <= 0:
            return
        rate = self.rate()
        is_faster = rate is None or delta / elapsed_s > _CLEARLY_FASTER * rate
        if self.queued or is_faster:
            kept = math.exp(-delta / memory_bytes - elapsed_s / _STALL_MEMORY_S)
            self._bytes = self._bytes * kept + delta
            self._busy_s = self._busy_s * kept + elapsed_s

    def rate(self) -> float | None:
        """Returns bytes/s of both directions together."""
        return self._bytes / self._busy_s if self._busy_s else None
