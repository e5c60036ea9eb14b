"""Updates that run under backward: of records whose gradients are complete.

[Note: staged versions]
What backward brings may still be dropped: no `step()` may follow. So an early update writes
versions that are not current yet, beside those that the rest of backward reads; `step()` makes them
current in no time, or they are given up. A record that stays in memory is updated at `step()`: it
has no second slot, and nothing of its state moves.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType

import torch

from offload.layout import ModelLayout, Record
from offload.optim.model_state import ParameterUpdate, parameter_key, state_key
from offload.optim.pipeline import UpdatePipeline
from offload.optim.update_job import UpdateJob
from offload.optim.update_waits import UpdateWaits
from offload.storage.stalls import StallAccount
from offload.storage.store import BlockStore
from offload.storage.threads import join

_CAUSE = "updates that began under backward"

UpdateOf = Callable[[str], ParameterUpdate | None]
"""Gives what the next step would apply to a parameter; None where it has no gradient."""


class EarlyUpdates:
    """Updates records as their gradients become complete. See [Note: staged versions].

    Attributes:
        waits: How long the caller's thread waited for updates.

    Concurrency: The thread that runs the model calls; updates run in one of their own.
    """

    def __init__(self, stalls: StallAccount) -> None:
        self.waits = UpdateWaits(stalls, cause=_CAUSE)
        self._layout: ModelLayout
        self._pipeline: UpdatePipeline
        self._store: BlockStore
        self._kept: Collection[str] = ()
        self._records_of: dict[str, list[int]] = {}
        self._names: list[frozenset[str]] = []
        # Of this backward: what has arrived of each record that is not complete.
        self._arrived: dict[int, set[str]] = {}
        # Over what follows.
        self._changed = threading.Condition()
        self._source = _ArrivingRecords(self._changed)
        self._applied: dict[int, dict[str, ParameterUpdate]] = {}
        self._in_flight: set[int] = set()
        self._updates: dict[str, ParameterUpdate] = {}
        self._job: UpdateJob | None = None
        self._failure: BaseException | None = None
        self._failed_at: TracebackType | None = None
        self._thread: threading.Thread | None = None
        self._num_threads = 1

    def use(self, pipeline: UpdatePipeline, *, kept: Collection[str]) -> None:
        """Says whose records are updated, but those in `kept`."""
        assert pipeline.state.store is not None
        layout = self._layout = pipeline.state.layout
        self._pipeline, self._store, self._kept = pipeline, pipeline.state.store, kept
        self._names = [
            frozenset(
                placed.facts.name for s in record.subgroups for placed in layout.parameters_in(s)
            )
            for record in layout.records
        ]
        self._records_of.clear()
        for index, names in enumerate(self._names):
            for name in names:
                self._records_of.setdefault(name, []).append(index)

    @property
    def has_begun(self) -> bool:
        """Whether a record was updated, or is being updated, for the step to come."""
        return bool(self._applied)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def arrived(self, name: str, *, update_of: UpdateOf, edited: Collection[str]) -> None:
        """Says that a gradient has arrived which no later one of this step is expected to change.

        Args:
            name: The parameter's.
            update_of: What a step would apply now.
            edited: Parameters that the user edited: their records are left to the step.
        """
        for index in self._records_of.get(name, ()):
            arrived = self._arrived.setdefault(index, set())
            arrived.add(name)
            names = self._names[index]
            if arrived < names or self._layout.records[index].name in self._kept:
                continue
            updates = {each: update_of(each) for each in names}
            if not names & set(edited) and all(updates.values()):
                self._submit(index, {n: u for n, u in updates.items() if u is not None})

    def forget(self, name: str) -> None:
        """Gives up the updates that used the gradient of a parameter, which is about to change.

        Raises:
            StorageError, CorruptStateError: An update failed.
        """
        for index in self._records_of.get(name, ()):
            self._arrived.get(index, set()).discard(name)
            if index in self._applied:
                self._wait(functools.partial(self._is_over, index))
                self._raise_failure()
                self._drop(index)

    def finish(self) -> None:
        """Waits until no update is in flight, so that others may use the pipeline.

        Raises:
            StorageError, CorruptStateError: One failed.
        """
        self._wait(lambda: not self._in_flight)
        self._end_job()
        self._raise_failure()

    def take(
        self, updates: Mapping[str, ParameterUpdate], *, edited: Collection[str]
    ) -> frozenset[str]:
        """Makes current what was updated as `updates` want it; gives up the rest.

        Returns:
            Names of the records that need no update any more.
        """
        self.finish()
        taken = []
        for index, applied in list(self._applied.items()):
            wanted = {name: updates.get(name) for name in applied}
            if wanted == applied and not self._names[index] & set(edited):
                self._store.publish_staged(self._keys(index))
                taken.append(self._layout.records[index].name)
                del self._applied[index]
            else:
                self._drop(index)
        self._arrived.clear()
        return frozenset(taken)

    def applied_to(self, name: str) -> ParameterUpdate | None:
        """Returns what was applied to a parameter, where something was; an empty one has none."""
        records = self._records_of.get(name, ())
        return next((self._applied[i][name] for i in records if i in self._applied), None)

    def drop(self) -> None:
        """Gives everything up, and forgets what failed."""
        self._end_job()
        for index in list(self._applied):
            self._drop(index)
        self._source.clear()  # what a failure left there has no update any more
        self._arrived.clear()
        self._in_flight.clear()
        self._failure = self._failed_at = None

    def close(self) -> None:
        """Gives everything up; again does nothing."""
        self.drop()

    def _submit(self, index: int, updates: dict[str, ParameterUpdate]) -> None:
        if self._failure is not None or index in self._applied:
            return
        try:
            with self._changed:
                self._applied[index] = updates
                self._in_flight.add(index)
                self._updates.update(updates)
                self._source.add(self._layout.records[index], index)
            if self._job is None:
                self._begin_job()
            self._pipeline.wake()
        except BaseException:  # an interrupt: what nobody takes up would be waited for
            self.drop()
            raise

    def _begin_job(self) -> None:
        self._source.open()
        self._num_threads = torch.get_num_threads()
        job = UpdateJob(
            source=self._source,
            touched=frozenset(),
            updates=self._updates,
            edited=frozenset(),
            kept=(),
            stalls=StallAccount(),
            on_updated=self._on_updated,
            is_staged=True,
        )
        self._job = job
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="offload-early-updates", daemon=True
        )
        self._thread.start()  # see [Note: an interrupted start]

    def _end_job(self) -> None:
        if self._thread is not None:
            self._source.close()
            self._pipeline.wake()
            join(self._thread)
            self._thread = None  # after the wait, which an interrupt may end
        self._job = None
        self._updates = {}

    def _wait(self, is_reached: Callable[[], bool]) -> None:
        """Waits, and counts it, until what is asked for is reached or an update failed."""
        with self._changed:
            if is_reached() or self._failure is not None:
                return
            started_s, io_before = time.perf_counter(), self._pipeline.io_waits()
            self._changed.wait_for(lambda: is_reached() or self._failure is not None)
        self.waits.add(self._pipeline, started_s=started_s, io_before=io_before)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            # Frames that it went through before must not keep gradients.
            raise self._failure.with_traceback(self._failed_at)

    def _is_over(self, index: int) -> bool:
        return index not in self._in_flight

    def _drop(self, index: int) -> None:
        self._applied.pop(index, None)
        self._store.drop_staged(self._keys(index))

    def _keys(self, index: int) -> list[str]:
        record = self._layout.records[index]
        return [state_key(record), *map(parameter_key, record.subgroups)]

    # In the thread of the updates.

    def _run(self, job: UpdateJob) -> None:
        try:
            if torch.get_num_threads() != self._num_threads:
                torch.set_num_threads(self._num_threads)
            self._pipeline.carry_out(job)
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            with self._changed:
                self._failure, self._failed_at = error, error.__traceback__
                self._changed.notify_all()

    def _on_updated(self, record: Record) -> None:
        with self._changed:
            self._in_flight.discard(self._source.number_of(record))
            self._changed.notify_all()


class _ArrivingRecords:
    """Records in the order in which their gradients became complete."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._waiting: list[Record] = []
        self._numbers: dict[str, int] = {}
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        self._is_open = False

    def is_open(self) -> bool:
        return self._is_open

    def clear(self) -> None:
        """Forgets the records that were not taken."""
        with self._lock:
            self._waiting.clear()

    def add(self, record: Record, number: int) -> None:
        """Adds a record that is complete. Under the lock."""
        self._waiting.append(record)
        self._numbers[record.name] = number

    def number_of(self, record: Record) -> int:
        return self._numbers[record.name]

    def peek(self) -> Record | None:
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def take(self, record: Record) -> None:
        with self._lock:
            self._waiting.remove(record)

    def choose(self, ready: Sequence[Record], *, is_stuck: bool) -> Record:
        del is_stuck
        return ready[0]
