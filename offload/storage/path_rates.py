"""What each path delivers now, from its counters: the figures that striping decides by.

[Note: busy intervals] Counters are looked at whenever a transfer is submitted. A path that has
bytes in flight at such a moment had some ever since the last one, as nothing was submitted in
between: it was busy for all of that interval, and the bytes that it moved say what it can do. Where
nothing is in flight any more, when it ran dry is not known, and the interval says only that the
path can do at least as much.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

_MEMORY_S = 0.4
"""After this much busy time what was measured counts for 1/e: long against one request, short
against a step."""


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
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stores its arguments.

        Args:
            counters: Gives the counters of each path since its engine was opened.
            clock_s: Monotonic seconds.
        """
        self._lock = threading.Lock()
        self._clock_s = clock_s
        self._paths = [_Path(read) for read in counters]
        self._last_s: float | None = None

    def note(self) -> None:
        """Looks at the counters; called before anything is submitted."""
        with self._lock:
            self._note()

    def submitted(self, path_index: int, *, read_bytes: int = 0, write_bytes: int = 0) -> None:
        """Says what was submitted to a path."""
        with self._lock:
            path = self._paths[path_index]
            path.read.submitted += read_bytes
            path.write.submitted += write_bytes

    def failed(self, path_index: int, *, read_bytes: int = 0, write_bytes: int = 0) -> None:
        """Takes back what was submitted and will never be counted as moved."""
        self.submitted(path_index, read_bytes=-read_bytes, write_bytes=-write_bytes)

    def queued_bytes(self, path_index: int) -> int:
        with self._lock:
            path = self._paths[path_index]
            return path.read.queued + path.write.queued

    def round_trip_bytes_per_s(self, path_index: int) -> float | None:
        """Returns how many bytes go in and out again each second, None where nothing is known."""
        with self._lock:
            path = self._paths[path_index]
            known = [rate for rate in (path.read.rate(), path.write.rate()) if rate is not None]
            if not known or not min(known):
                return 0.0 if known else None
            return len(known) / sum(1 / rate for rate in known) / 2

    def _note(self) -> None:
        now_s = self._clock_s()
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        for path in self._paths:
            moved = path.counters()
            path.read.look(moved.read_bytes, elapsed_s)
            path.write.look(moved.write_bytes, elapsed_s)


class _Direction:
    """One direction of one path."""

    def __init__(self) -> None:
        self.submitted = 0
        self._seen: int | None = None
        self._start = 0  # of the counter when the store was opened
        self._bytes = 0.0
        self._busy_s = 0.0

    @property
    def queued(self) -> int:
        return max(self.submitted - ((self._seen or 0) - self._start), 0)

    def look(self, moved_bytes: int, elapsed_s: float) -> None:
        if self._seen is None:
            self._seen = self._start = moved_bytes
            return
        was_busy = self.queued > 0
        delta = moved_bytes - self._seen
        self._seen = moved_bytes
        if not was_busy or elapsed_s <= 0:
            return
        if self.queued:
            self._add(delta, elapsed_s)
        else:
            rate = self.rate()
            if rate is None or delta / elapsed_s > rate:
                self._add(delta, elapsed_s)

    def rate(self) -> float | None:
        return self._bytes / self._busy_s if self._busy_s else None

    def _add(self, num_bytes: int, busy_s: float) -> None:
        kept = math.exp(-busy_s / _MEMORY_S)
        self._bytes = self._bytes * kept + num_bytes
        self._busy_s = self._busy_s * kept + busy_s


class _Path:
    def __init__(self, counters: Callable[[], Moved]) -> None:
        self.counters = counters
        self.read = _Direction()
        self.write = _Direction()
