"""Carries out the updates of a step: at once, or under the next forward."""

from collections.abc import Callable, Collection, Container, Iterable, Mapping

from offload.errors import ConfigError, StoreError
from offload.layout import ModelLayout
from offload.optim.deferred import DeferredUpdates
from offload.optim.early import EarlyUpdates
from offload.optim.kernels import Kernels
from offload.optim.model_state import ModelState, ParameterUpdate
from offload.optim.pipeline import UpdatePipeline
from offload.optim.window import Window
from offload.policy import Order, Overlap
from offload.storage.stalls import StallAccount
from offload.streaming.pending import PendingUnits
from offload.streaming.resident import ResidentUnits
from offload.streaming.tier import HostUnits, StoredUnits
from offload.streaming.torch_private import is_in_backward
from offload.streaming.trace import AccessTrace


class StepUpdates:
    """Runs the pipeline for a wrapped model, and knows what of the last step is pending.

    Attributes:
        pipeline: Reads, updates and writes records.
        stalls: What the caller's thread waited for.
        failure: What ended an update or a step in its middle, or an update under backward; None
            where nothing did.
        on_failure: Called when that is first known.
        deferred: The updates that run under the next forward; None where they run at once.
        early: The updates that run under backward; None where none do.
        resident: Hides resident parameters whose update is pending; None where there are none.

    Concurrency: The thread that runs the model.
    """

    def __init__(self, *, order: Order, overlap: Overlap | None, is_early: bool = False) -> None:
        self.pipeline: UpdatePipeline
        self.stalls = StallAccount()
        self.failure: BaseException | None = None
        self._found = ""  # after `failure`
        self._is_closed = False
        self.on_failure: Callable[[], None] = lambda: None
        self.deferred = DeferredUpdates(overlap, self.stalls) if overlap is not None else None
        self.early = EarlyUpdates(self.stalls) if is_early else None
        self.resident: ResidentUnits | None = None
        self._order = order
        self._units: PendingUnits | None = None
        self._slotted: frozenset[int] = frozenset()
        self._unit_of: dict[str, int] = {}  # by parameter name
        self._io_wait_s = 0.0

    def use(self, state: ModelState, window: Window, kernels: Kernels) -> None:
        """Says what is updated; nothing is pending."""
        self.pipeline = UpdatePipeline(state, window, kernels, self.stalls)
        if self.deferred is not None:
            self.deferred.use(state.layout, self.pipeline)
            self._unit_of = {
                placed.facts.name: index
                for index, unit in enumerate(state.layout.units)
                for shard in unit.shards
                for placed in shard.parameters
            }
        if self.early is not None:
            self.early.use(self.pipeline, kept=self.kept(step=1))

    def gate(
        self, layout: ModelLayout, tier: StoredUnits | HostUnits, *, wide: Collection[int] = ()
    ) -> PendingUnits | None:
        """Returns a tier over `tier` that reads no unit before its update; None: none is needed.

        Args:
            wide: Units that no slot holds.
        """
        if self.deferred is None:
            return None
        if isinstance(tier, StoredUnits):
            self._slotted = frozenset(range(len(layout.units))).difference(wide)
        self._units = PendingUnits(layout, tier, self.deferred)
        return self._units

    @property
    def io_wait_s(self) -> float:
        """Time for which the caller's thread waited for storage in updates."""
        others = (each.waits.io_wait_s for each in (self.deferred, self.early) if each is not None)
        return self._io_wait_s + sum(others)

    def take_early(self, updates: Mapping[str, ParameterUpdate]) -> frozenset[str]:
        """Makes current what ran under backward; returns the records that are done.

        Raises:
            ConfigError: Gradients were scaled since, which an update under backward cannot know.
        """
        early, edited = self.early, self.pipeline.state.edited
        if early is None:
            return frozenset()
        for name, update in updates.items():
            applied = early.applied_to(name)
            if applied is not None and applied.scales != update.scales:
                early.drop()
                raise ConfigError(
                    f"cannot update `{name}` under backward: expected its gradient as backward "
                    "left it, found it clipped by a global norm or unscaled; set "
                    '`policy.overlap` to `"forward"` or `"none"`'
                )
        try:
            early.finish()
        finally:
            self._fail_early()
        try:
            return early.take(updates, edited=edited)
        except BaseException as error:  # some of it may be current already
            self.fail(error)
            raise

    def run(
        self,
        updates: Mapping[str, ParameterUpdate],
        *,
        step: int,
        skip: Container[str] = (),
    ) -> None:
        """Carries out the updates of step `step` now, or what the user edited where there are none.

        Args:
            updates: By parameter name.
            step: From 1.
            skip: Names of records that need no update any more.

        Raises:
            StorageError, CorruptStateError: A transfer failed: the state is between two steps.
        """
        pipeline = self.pipeline
        records = pipeline.state.layout.records
        sequence = self._order.sequence(len(records), step)
        # Edits alone move nothing in or out of the cache.
        kept = self.kept(step) if updates else set(pipeline.window.cached)
        waited_s = pipeline.io_wait_s
        elsewhere = pipeline.state.elsewhere
        try:
            if elsewhere is not None:
                elsewhere.begin()
            order = [records[i] for i in sequence if records[i].name not in skip]
            pipeline.run(order, updates, kept=kept)
            if elsewhere is not None:
                elsewhere.wait_all()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._io_wait_s += pipeline.io_wait_s - waited_s

    def start(
        self,
        updates: Mapping[str, ParameterUpdate],
        *,
        step: int,
        trace: AccessTrace,
        skip: Container[str] = (),
    ) -> None:
        """Starts the updates of step `step`, which go on while the next forward runs."""
        assert self.deferred is not None
        state = self.pipeline.state
        trace.end_step()
        edited = frozenset(state.edited)
        state.edited.clear()
        if state.elsewhere is not None:
            state.elsewhere.begin()
        if self.resident is not None:
            self.resident.hide(updates)
        self.deferred.start(
            updates,
            edited=edited,
            kept=self.kept(step),
            upcoming=list(trace.upcoming()),
            slotted=self._slotted,
            skip=skip,
        )

    def kept(self, step: int) -> set[str]:
        """Returns the names of the records that step `step` leaves in memory."""
        records, num_cached = self.pipeline.state.layout.records, self.pipeline.window.num_cached
        kept = self._order.kept(len(records), num_cached, step)
        return {records[index].name for index in kept}

    def finish(self) -> None:
        """Waits until no update is pending.

        Raises:
            StorageError, CorruptStateError: One failed: the state is between two steps.
        """
        if self.early is not None:
            try:
                self.early.finish()
            finally:
                self._fail_early()
        if self.deferred is None:
            return
        try:
            self.deferred.finish()
        finally:
            self.fail(self.deferred.failure)
        if self.resident is not None:
            self.resident.show_all()

    def wait_for(self, names: Iterable[str]) -> None:
        """Waits until no update of these parameters is pending, nor any of their units.

        Raises:
            StorageError, CorruptStateError: One failed: the state is between two steps.
        """
        assert self.deferred is not None
        for unit in sorted({self._unit_of[name] for name in names}):
            self.deferred.wait_for(unit)

    def finish_before_gradient(self, name: str) -> bool:
        """Finishes the updates that read the gradients, and reads ahead for the next ones.

        Args:
            name: Of the parameter whose gradient is about to change.

        Returns:
            Whether this is the first write to gradients since a step.
        """
        if self.early is not None:
            self.early.forget(name)
        deferred = self.deferred
        if deferred is None or not deferred.reads_gradients:
            return False
        self.finish()
        deferred.reads_gradients = False
        if is_in_backward() and self.early is None:
            deferred.prefetch()
        return True

    def drop(self) -> None:
        """Ends what is pending, whatever it gives; `failure` stays until `forget_failure`."""
        if self.deferred is not None:
            self.fail(self.deferred.forget_failure())
        if self._units is not None:
            self._units.cancel_late()
        if self.resident is not None:
            self.resident.show_all()
        if self.early is not None:
            self.early.drop()
        self.pipeline.drop_prefetched()

    def close(self) -> None:
        """Finishes what is pending and ends the thread; again does nothing.

        Raises:
            StorageError, CorruptStateError: An update failed, which nobody knows yet.
        """
        self._is_closed = True
        early, self.early = self.early, None
        if early is not None:
            early.close()
        deferred, self.deferred = self.deferred, None
        if deferred is None:
            return
        try:
            if self.failure is None and not deferred.was_raised:
                deferred.finish()
        finally:
            self.fail(deferred.failure)
            deferred.close()
            if self.resident is not None:
                self.resident.show_all()

    def fail(self, error: BaseException | None) -> None:
        """Notes what left the state between two steps; None: nothing did."""
        if error is not None:
            self._found = "it between two steps, as an update failed"
            self._note_failure(error)

    def _fail_early(self) -> None:
        """Notes what ended an update under backward: what it wrote is not current."""
        failure = None if self.early is None else self.early.failure
        if failure is not None and self.failure is None:
            self._found = "that an update which began under backward failed"
            self._note_failure(failure)

    def _note_failure(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self.on_failure()

    def forget_failure(self) -> None:
        """Says that the state is one of a commit again."""
        self.failure = None

    def require_whole(self, action: str) -> None:
        """Raises StoreError if an update or a step failed in its middle, or all is closed."""
        if self._is_closed:
            raise StoreError(
                f"cannot {action}: expected an open session, or optimizer of its own, found it "
                "closed; do so inside its `with` block"
            )
        self._fail_early()
        if self.deferred is not None:
            self.fail(self.deferred.failure)
        self._require_no_failure(action)

    def require_usable(self) -> None:
        """Raises if parameters are those of two steps, for who is about to use them.

        What early updates wrote is not current: where one failed parameters are as they were.

        Raises:
            StorageError, CorruptStateError: An update failed, which the caller does not know yet.
            StoreError: One failed before.
        """
        if self.deferred is not None and self.deferred.failure is not None:
            if not self.deferred.was_raised:
                self.deferred.raise_failure()
            self.fail(self.deferred.failure)
        if self.failure is not None:
            self._require_no_failure("use a parameter")

    def note_raised(self, error: BaseException) -> None:
        """Says that the caller gets `error`, which an update may have failed with."""
        if self.deferred is not None:
            self.deferred.note_raised(error)

    def _require_no_failure(self, action: str) -> None:
        if self.failure is not None:
            raise StoreError(
                f"cannot {action}: expected the state of one step, found {self._found} "
                f"({self.failure}); go back with `session.load(checkpoint)`, or close the session "
                "and resume from the last commit"
            ) from self.failure
