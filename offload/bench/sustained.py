"""Writes on until the rate is steady: past write caches and into thermal limits."""

import statistics
import time
from collections.abc import Sequence

from offload.bench.io_path import OnSample
from offload.bench.io_report import Sustained
from offload.bench.stream import Budget, Sample, Stream
from offload.storage.transfer import Operation

_WINDOW_S = 1.0
_NUM_STEADY = 8
_MAX_SPREAD = 1.10
"""Windows in a row whose largest rate is at most so many times the smallest."""
_MAX_DRIFT = 0.03
"""And whose second half differs from the first by no more: a slow slope is not steady."""


def measure_sustained(
    stream: Stream, *, max_bytes: int, on_sample: OnSample, window_s: float = _WINDOW_S
) -> Sustained:
    """Writes at most `max_bytes`, over the stream's file again and again, until it is steady."""
    windows: list[float] = []
    written = 0
    started_s = time.perf_counter()
    stream.rewind()
    # The first window says how many bytes a window takes; each ends with a flush, so that no
    # cache of the operating system takes part.
    window_bytes = min(stream.size_bytes, max_bytes)
    while written < max_bytes and not is_steady(windows):
        before_s = time.perf_counter()
        moved = stream.move(
            (Operation.WRITE,), Budget(min(window_bytes, max_bytes - written)), flush=True
        )
        elapsed_s = time.perf_counter() - before_s
        written += moved.write_bytes
        windows.append(moved.write_bytes / elapsed_s)
        window_bytes = max(int(windows[-1] * window_s), 1)
        on_sample(
            "sustained",
            Sample(at_s=time.perf_counter() - started_s, num_bytes=written),
            max_bytes,
        )
    steady = is_steady(windows)
    return Sustained(
        write_bytes_per_s=statistics.median(windows[-_NUM_STEADY:]) if steady else None,
        is_steady=steady,
        written_bytes=written,
        max_bytes=max_bytes,
        seconds=time.perf_counter() - started_s,
        first_bytes_per_s=windows[0],
        window_bytes_per_s=tuple(windows),
    )


def is_steady(windows: Sequence[float]) -> bool:
    """Returns whether the last windows agree and do not drift."""
    last = windows[-_NUM_STEADY:]
    if len(last) < _NUM_STEADY or max(last) > _MAX_SPREAD * min(last):
        return False
    half = _NUM_STEADY // 2
    before, after = statistics.mean(last[:half]), statistics.mean(last[half:])
    return abs(after - before) <= _MAX_DRIFT * before
