"""Updates that run on a thread of their own while the caller's thread goes on.

[Note: what a pending update may rely on]
From `start` until it is done an update reads gradients, pending factors and scalars as they were:
the accumulators are not written before `finish`, factors and scalars are copies. It alone writes
records, parameters of records and the window. The caller's thread waits, by unit, before it reads
parameters, and for all before it writes gradients, commits, or looks at the state.
"""

import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from types import TracebackType

import torch

from offload.layout import ModelLayout, Record
from offload.optim.handover import HandedOver, Handovers
from offload.optim.model_state import ParameterUpdate
from offload.optim.pending_records import PendingRecords
from offload.optim.pipeline import UpdatePipeline
from offload.optim.update_job import UpdateJob
from offload.optim.update_waits import UpdateWaits
from offload.policy import Overlap
from offload.storage.stalls import StallAccount
from offload.storage.threads import join, was_started

_CAUSE = "a unit whose update is pending"


class DeferredUpdates:
    """Carries out the updates of one step at a time. See [Note: what a pending update may rely on].

    Attributes:
        reads_gradients: Whether the accumulators were not written since `start`. Set to False by
            who writes them.
        was_raised: Whether the caller knows of the failure.
        waits: How long the caller's thread waited for updates.

    Concurrency: The thread that runs the model calls, autograd's in backward included; others may
        wait too, without asking and uncounted. Callbacks run in the updates' thread or the one that
        asks for them.
    """

    def __init__(self, policy: Overlap, stalls: StallAccount) -> None:
        self.reads_gradients = False
        self.was_raised = False
        self.waits = UpdateWaits(stalls, cause=_CAUSE)
        self._policy = policy
        self._pipeline: UpdatePipeline
        self._records: Sequence[Record] = ()
        self._units: list[tuple[int, ...]] = []
        self._records_of: dict[int, list[int]] = {}
        self._sequence: Sequence[int] = ()
        # Over what follows; the worker waits for `_job`, the caller for what it asked for.
        self._changed = threading.Condition()
        self._handovers = Handovers((), {})
        self._pending = PendingRecords(policy, self._changed)
        self._num_left: dict[int, int] = {}
        self._callbacks: dict[int, list[Callable[[], None]]] = {}
        self._job: UpdateJob | None = None
        self._num_threads = 1
        self._failure: BaseException | None = None
        self._failed_at: TracebackType | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def use(self, layout: ModelLayout, pipeline: UpdatePipeline) -> None:
        """Says whose records are updated, and by what; nothing is pending."""
        unit_of = {shard.name: i for i, unit in enumerate(layout.units) for shard in unit.shards}
        self._pipeline = pipeline
        self._records = layout.records
        self._units = [
            tuple(sorted({unit_of[s.shard] for s in record.subgroups})) for record in layout.records
        ]
        self._handovers = Handovers(layout.records, unit_of)
        self._records_of.clear()
        for index, units in enumerate(self._units):
            for unit in units:
                self._records_of.setdefault(unit, []).append(index)

    @property
    def is_pending(self) -> bool:
        return self._job is not None

    @property
    def failure(self) -> BaseException | None:
        """What ended the updates of a step; None where nothing did."""
        return self._failure

    def start(
        self,
        updates: Mapping[str, ParameterUpdate],
        *,
        edited: frozenset[str],
        kept: Container[str],
        upcoming: Sequence[int],
        slotted: Container[int] = (),
        skip: Container[str] = (),
    ) -> None:
        """Takes the updates of a step over and returns at once. Nothing else may be pending.

        Args:
            updates: By parameter name.
            edited: Parameters that are the master again.
            kept: Names of records whose state stays in memory.
            upcoming: The units of the next forward, by first use, as far as it is known.
            slotted: Units that come into a slot before they are used.
            skip: Names of records that need no update any more.
        """
        assert not self.is_pending
        if not was_started(self._thread):  # see [Note: an interrupted start]
            self._thread = threading.Thread(target=self._run, name="offload-updates", daemon=True)
            self._thread.start()
        self.reads_gradients = True
        touched = self._pipeline.touched(self._records, updates.keys() | edited)
        names = frozenset(record.name for record in touched if record.name not in skip)
        self._sequence = [
            index
            for index in self._policy.sequence(self._units, upcoming)
            if self._records[index].name in names
        ]
        with self._changed:
            self._handovers.begin(self._sequence, [u for u in upcoming if u in slotted])
            self._pending.begin(self._records, self._sequence, self._handovers)
            self._num_left.clear()
            for index in self._sequence:
                for unit in self._units[index]:
                    self._num_left[unit] = self._num_left.get(unit, 0) + 1
            self._num_threads = torch.get_num_threads()
            self._job = UpdateJob(
                source=self._pending,
                touched=names,
                updates=updates,
                edited=edited,
                kept=kept,
                stalls=StallAccount(),  # what is hidden is no stall
                on_updated=self._on_updated,
                on_computed=self._on_computed,
            )
            self._changed.notify_all()

    def is_updated(self, unit: int) -> bool:
        """Tells whether no update of the unit's parameters is pending."""
        return not self._num_left.get(unit)

    def when_updated(self, unit: int, callback: Callable[[], None]) -> None:
        """Calls `callback` when no update of the unit is pending: now, or in the updates' thread.

        If the updates fail it is never called, and `wait_for` says why.
        """
        with self._changed:
            if self._num_left.get(unit):
                if self._failure is None:
                    self._callbacks.setdefault(unit, []).append(callback)
                return
        callback()

    def hand_over(self, subgroup: str, into: memoryview) -> HandedOver | None:
        """Returns what brings a subgroup into memory when its update is computed.

        Args:
            subgroup: Its name.
            into: Where its parameters go, padded.

        Returns:
            None where its parameters were computed before, or no update of them is pending.
        """
        with self._changed:
            if not self._handovers.is_to_come(subgroup):
                return None
            handed = HandedOver(into, lambda each, asks: self._wait_handed(number, each, asks=asks))
            number = self._handovers.add(subgroup, handed)
            if self._failure is not None:
                handed.let_go()
        self._pipeline.wake()  # it may wait for this
        return handed

    def is_to_come(self, subgroup: str) -> bool:
        """Tells whether `hand_over` would bring a subgroup."""
        with self._changed:
            return self._handovers.is_to_come(subgroup)

    def is_written(self, subgroup: str) -> bool:
        """Tells whether no update of a subgroup is pending."""
        with self._changed:
            return self._handovers.is_written(subgroup)

    def wait_for(self, unit: int, *, asks: bool = True) -> float:
        """Waits until no update of the unit is pending.

        Args:
            asks: Whether its update comes next: who calls can't go on without it.

        Returns:
            For how long who asks waited.

        Raises:
            StorageError, CorruptStateError: The updates failed.
        """
        if self.is_updated(unit):
            return 0.0
        if asks:
            with self._changed:
                self._pending.need(self._records_of.get(unit, ()))
        return self._wait(lambda: self.is_updated(unit), is_counted=asks)

    def finish(self) -> None:
        """Waits until nothing is pending.

        Raises:
            StorageError, CorruptStateError: The updates failed.
        """
        if self.is_pending or self._failure is not None:
            self._hurry()
            try:
                self._wait(lambda: not self.is_pending and self._failure is None)
            except BaseException as error:
                self.note_raised(error)
                raise

    def raise_failure(self) -> None:
        """Raises what ended the updates of a step, if they failed; waits for nothing."""
        if self._failure is not None:
            # Frames that the failure went through before must not keep what they referred to.
            raise self._failure.with_traceback(self._failed_at)

    def note_raised(self, error: BaseException) -> None:
        """Says that the caller gets `error`: others that meet a failure may ignore it."""
        self.was_raised |= error is self._failure

    def prefetch(self) -> None:
        """Starts reading the records that the next step is expected to update first."""
        assert not self.is_pending
        window = self._pipeline.window
        cached = {i for i, record in enumerate(self._records) if record.name in window.cached}
        chosen = self._policy.prefetched(
            self._sequence,
            cached=cached,
            capacity=window.num_free,
            num_places=window.num_places - window.num_places_taken,
        )
        self._pipeline.prefetch([self._records[index] for index in chosen])

    def forget_failure(self) -> BaseException | None:
        """Goes on as if nothing had been pending; returns what failed."""
        self._hurry()
        with self._changed:
            self._changed.wait_for(lambda: self._job is None)
            failure, self._failure, self._failed_at = self._failure, None, None
            self.was_raised = False
            self._num_left.clear()
            self._callbacks.clear()
            self._handovers.clear()
        return failure

    def close(self) -> None:
        """Waits for what is pending, whatever it gives, and ends the thread; again does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._hurry()
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            join(thread)

    def _hurry(self) -> None:
        """Has no update wait for slots any more."""
        with self._changed:
            self._pending.is_hurried = True
        self._pipeline.wake()

    def _wait_handed(self, number: int, handed: HandedOver, *, asks: bool) -> None:
        if asks:
            with self._changed:
                self._pending.need((number,))
        self._wait(handed.done, is_counted=asks)

    def _wait(self, is_reached: Callable[[], bool], *, is_counted: bool = True) -> float:
        started_s, io_before = time.perf_counter(), self._pipeline.io_waits()
        self._pipeline.wake()  # it may wait for another record's transfers
        with self._changed:
            self._changed.wait_for(lambda: is_reached() or self._failure is not None)
        if not is_reached():
            self.raise_failure()
        if not is_counted:
            return 0.0
        return self.waits.add(self._pipeline, started_s=started_s, io_before=io_before)

    # In the thread of the updates.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._is_closing)
                job = self._job
            if job is None:
                return
            failure: BaseException | None = None
            try:
                # Matrices are multiplied here as they would be in the caller's thread.
                if torch.get_num_threads() != self._num_threads:
                    torch.set_num_threads(self._num_threads)
                self._pipeline.carry_out(job)
            except BaseException as error:  # noqa: BLE001 - raised where somebody waits
                failure = error
            del job
            with self._changed:
                self._job = None
                self._failure = failure
                if failure is not None:  # what waits must not keep slots
                    self._failed_at = failure.__traceback__
                    self._callbacks.clear()
                    self._handovers.fail()
                self._changed.notify_all()
            del failure

    def _on_updated(self, record: Record) -> None:
        ready: list[Callable[[], None]] = []
        with self._changed:
            number = self._pending.number_of(record)
            self._pending.finish(number)
            self._handovers.finish(number)
            for unit in self._units[number]:
                self._num_left[unit] -= 1
                if not self._num_left[unit]:
                    ready.extend(self._callbacks.pop(unit, ()))
            self._changed.notify_all()
        for callback in ready:
            callback()

    def _on_computed(self, record: Record, parameters: Mapping[str, memoryview]) -> None:
        with self._changed:
            waiting = self._handovers.take(self._pending.number_of(record))
        for name, handed in waiting.items():
            handed.give(parameters[name])
        with self._changed:
            self._changed.notify_all()
