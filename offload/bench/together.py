"""Measures all paths at the same time."""

import threading
import time
from collections.abc import Sequence

from offload.bench.io_path import OnSample
from offload.bench.io_report import Together
from offload.bench.stream import Budget, Moved, Sample, Stream
from offload.storage.transfer import Operation


def measure_together(
    streams: Sequence[Stream], patterns: Sequence[str], *, num_bytes: int, on_sample: OnSample
) -> Together:
    """Returns the rates at which all streams together move `num_bytes`.

    No shares are set: each path takes the next request when it has room, so that a fast one
    takes more and all end at nearly the same time.
    """
    # Reads last: `first_done_s` and `last_done_s` are those of the last pattern.
    rates: dict[str, float] = {}
    first_s = last_s = 0.0
    for pattern, operation in (("write", Operation.WRITE), ("read", Operation.READ)):
        if pattern not in patterns:
            continue
        done_s = _move_all(streams, operation, num_bytes, on_sample)
        first_s, last_s = min(done_s), max(done_s)
        rates[pattern] = num_bytes / last_s
    return Together(
        read=rates.get("read"), write=rates.get("write"), first_done_s=first_s, last_done_s=last_s
    )


def _move_all(
    streams: Sequence[Stream], operation: Operation, num_bytes: int, on_sample: OnSample
) -> list[float]:
    """Returns for each stream after how long it was done."""
    budget = Budget(num_bytes)
    workers = [_Worker(stream, operation, budget) for stream in streams]
    started_s = time.perf_counter()
    for worker in workers:
        worker.thread.start()
    try:
        while any(worker.thread.is_alive() for worker in workers):
            for worker in workers:
                worker.thread.join(0.1)
            moved = sum(worker.num_bytes for worker in workers)
            sample = Sample(at_s=time.perf_counter() - started_s, num_bytes=moved)
            on_sample(f"together {operation.value}", sample, num_bytes)
    finally:
        budget.stop()
        for worker in workers:
            worker.thread.join()
    return [worker.done_s(started_s) for worker in workers]


class _Worker:
    """Runs one stream on a thread of its own."""

    def __init__(self, stream: Stream, operation: Operation, budget: Budget) -> None:
        self.num_bytes = 0
        self.thread = threading.Thread(target=self._run, name="offload-bench")
        self._stream = stream
        self._operation = operation
        self._budget = budget
        self._ended_s = 0.0
        self._moved: Moved | None = None
        self._error: BaseException | None = None

    def done_s(self, started_s: float) -> float:
        if self._error is not None:
            raise self._error
        return self._ended_s - started_s

    def _run(self) -> None:
        try:
            self._stream.rewind()
            self._moved = self._stream.move(
                (self._operation,),
                self._budget,
                flush=self._operation is Operation.WRITE,
                in_small_parts=True,
                on_sample=self._note,
            )
        except BaseException as error:  # noqa: BLE001 - raised by `done_s`, in the caller's thread
            self._error = error
            self._budget.stop()
        self._ended_s = time.perf_counter()

    def _note(self, sample: Sample) -> None:
        self.num_bytes = sample.num_bytes
