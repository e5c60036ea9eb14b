"""What a wrapped model counts: bytes that its steps moved, and time that they waited."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from offload.storage.stalls import Stall
from offload.storage.store import BlockStore
from offload.streaming.activation_store import ActivationCounters
from offload.streaming.activations import Activations
from offload.streaming.attachment import Attachment
from offload.streaming.link_waits import LinkWaits
from offload.streaming.spilled_gradients import SpilledGradients
from offload.streaming.step_updates import StepUpdates


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """What a model's steps moved from and to storage, padding included, or found in memory."""

    read_bytes: int = 0
    write_bytes: int = 0
    cache_hit_bytes: int = 0


class ModelCounters:
    """Counts for one wrapped model since it was wrapped.

    Attributes:
        update_s: Time in updates of steps, as far as the caller's thread spent it.
        commit_record_bytes: Of records, written because of commits.
        digest_read_bytes: Of records, read for digests.
        offloaded: The activations that are moved; None where none are.
        spilled: The gradients that are; None where none are.
        others: Gives the counters of the session's other models, which share the store.
    """

    def __init__(
        self,
        *,
        updates: StepUpdates,
        attachment: Attachment,
        store: BlockStore | None,
        link_waits: LinkWaits,
    ) -> None:
        self.update_s = 0.0
        self.commit_record_bytes = 0
        self.digest_read_bytes = 0
        self.offloaded: Activations | None = None
        self.spilled: SpilledGradients | None = None
        self.others: Callable[[], Iterable[ModelCounters]] = lambda: ()
        self._updates = updates
        self._attachment = attachment
        self._store = store
        self._link_waits = link_waits
        self._moved_by_steps = MovedBytes()

    @property
    def io_wait_s(self) -> float:
        """Time for which the caller's thread waited for storage or the link to a device."""
        residency = self._attachment.residency
        fetches_s = residency.counters.io_wait_s if residency else 0.0
        spilled_s = self.spilled.wait_s if self.spilled else 0.0
        moved_s = self.activations.wait_s + spilled_s + self._link_waits.wait_s
        return fetches_s + self._updates.io_wait_s + moved_s

    @property
    def update_wait_s(self) -> tuple[float, float]:
        """Time for which passes waited for pending updates, and the part of it for storage."""
        deferred = self._updates.deferred
        return (deferred.waits.wait_s, deferred.waits.io_wait_s) if deferred else (0.0, 0.0)

    @property
    def update_read_bytes(self) -> int:
        return self._updates.pipeline.read_bytes

    @property
    def ahead_read_bytes(self) -> int:
        """Of records that were read for units which are still to be used."""
        residency = self._attachment.residency
        return residency.ahead_read_bytes if residency else 0

    @property
    def spilled_read_bytes(self) -> int:
        """Of gradients, from storage, padding included."""
        return self.spilled.spill.read_bytes if self.spilled else 0

    @property
    def spilled_write_bytes(self) -> int:
        """Of gradients, to storage, padding included."""
        return self.spilled.spill.write_bytes if self.spilled else 0

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """What the caller's thread waited for, longest first."""
        return self._updates.stalls.stalls()

    @property
    def activations(self) -> ActivationCounters:
        """What was moved of activations."""
        return self.offloaded.counters if self.offloaded else ActivationCounters()

    def moved(self) -> MovedBytes:
        """Returns what all models moved so far, without what commits wrote and digests read."""
        io = self._store.stats() if self._store is not None else None
        every = self._every()
        beside_reads = sum(each.spilled_read_bytes - each.digest_read_bytes for each in every)
        beside_writes = sum(each.spilled_write_bytes - each.commit_record_bytes for each in every)
        return MovedBytes(
            read_bytes=io.read_bytes + beside_reads if io else 0,
            write_bytes=io.write_bytes + beside_writes if io else 0,
            cache_hit_bytes=self._updates.pipeline.cache_hit_bytes,
        )

    def moved_by_steps(self) -> MovedBytes:
        """Returns what was used of `moved` when no update was pending last.

        So differences are of whole steps, however far ahead units are fetched.
        """
        return self._used() if self._updates.deferred is None else self._moved_by_steps

    def end_step(self) -> None:
        """Takes what was used so far as that of whole steps."""
        self._moved_by_steps = self._used()

    def _used(self) -> MovedBytes:
        moved = self.moved()
        ahead_bytes = sum(each.ahead_read_bytes for each in self._every())
        return replace(moved, read_bytes=moved.read_bytes - ahead_bytes)

    def _every(self) -> "list[ModelCounters]":
        return [self, *self.others()]

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Counts what is written in this context as written because of a commit."""
        assert self._store is not None
        before = self._store.stats().write_bytes
        yield
        self.commit_record_bytes += self._store.stats().write_bytes - before

    @contextlib.contextmanager
    def digesting(self) -> Iterator[None]:
        """Counts what is read in this context as read for a digest."""
        before = self._read_bytes()
        yield
        self.digest_read_bytes += self._read_bytes() - before

    def _read_bytes(self) -> int:
        return self._store.stats().read_bytes if self._store is not None else 0
