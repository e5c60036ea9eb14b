"""Units whose parameters a pending update still has to write: they are read when it is done."""

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from offload.layout import ModelLayout, Unit
from offload.optim.deferred import DeferredUpdates
from offload.streaming.tier import HostUnits, StoredUnits
from offload.streaming.unit import Transfer


class PendingUnits:
    """A tier over another one, which reads no unit before its update is done."""

    def __init__(
        self, layout: ModelLayout, tier: StoredUnits | HostUnits, deferred: DeferredUpdates
    ) -> None:
        self._numbers = {unit.name: index for index, unit in enumerate(layout.units)}
        self._tier = tier
        self._deferred = deferred
        # A slot comes back when nobody refers to its memory: not from here.
        self._late: weakref.WeakSet[LateRead] = weakref.WeakSet()

    def can_prefetch(self) -> bool:
        """Returns what the tier does."""
        return self._tier.can_prefetch()

    def wait_readable(self, unit: Unit) -> None:
        """Waits until no update of the unit is pending.

        Raises:
            StorageError, CorruptStateError: The update failed.
        """
        self._deferred.wait_for(self._numbers[unit.name])

    def waits_for(self, transfers: Sequence[Transfer]) -> str:
        """Returns what the tier does, of reads that were late too."""
        plain: list[Transfer] = []
        for transfer in transfers:
            plain += transfer.transfers if isinstance(transfer, LateRead) else [transfer]
        return self._tier.waits_for(plain)

    @property
    def granule_bytes(self) -> int:
        """As the tier has it."""
        return self._tier.granule_bytes

    def start_read(
        self, unit: Unit, into: torch.Tensor, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """Starts filling `into`; what is needed now waits for the unit's update first.

        Raises:
            StorageError, CorruptStateError: The update failed.
        """
        tier = self._tier
        return self._start(
            unit,
            is_prefetch,
            lambda: tier.start_read(unit, into, is_prefetch=is_prefetch, part=part),
        )

    def start_read_into(
        self, unit: Unit, into: memoryview, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """As `start_read`, into host memory, from storage."""
        tier = self._tier
        assert isinstance(tier, StoredUnits)
        return self._start(
            unit,
            is_prefetch,
            lambda: tier.start_read_into(unit, into, is_prefetch=is_prefetch, part=part),
        )

    def write(self, unit: Unit, source: torch.Tensor) -> None:
        """Writes the whole unit, whose update is done, and waits."""
        self._tier.write(unit, source)

    def write_from(self, unit: Unit, source: memoryview) -> None:
        """As `write`, from host memory."""
        self._tier.write_from(unit, source)

    def cancel_late(self) -> None:
        """Ends prefetches whose updates failed; what they were to fill is worth nothing."""
        for late in list(self._late):
            late.cancel()

    def _start(
        self, unit: Unit, is_prefetch: bool, read: Callable[[], list[Transfer]]
    ) -> list[Transfer]:
        number = self._numbers[unit.name]
        if is_prefetch and not self._deferred.is_updated(number):
            late = LateRead(read, wait_for_update=lambda: self._deferred.wait_for(number))
            self._late.add(late)
            self._deferred.when_updated(number, late.start)
            return [late]
        self._deferred.wait_for(number)
        return read()


class LateRead:
    """A prefetch that starts when the update of its unit is done.

    Ownership: Once `wait` has returned this refers to the memory no more, so that its slot is free
        when the unit leaves it, wherever a reference to this is left.
    Concurrency: `start` in the updates' thread, the rest in any other.
    """

    def __init__(
        self, read: Callable[[], list[Transfer]], *, wait_for_update: Callable[[], float]
    ) -> None:
        self._read: Callable[[], list[Transfer]] | None = read
        self._wait_for_update = wait_for_update
        self._started = threading.Event()
        self.transfers: list[Transfer] = []
        self._failure: BaseException | None = None

    def start(self) -> None:
        try:
            if self._read is not None:
                self.transfers = self._read()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, not in the updates
            self._failure = error
        finally:
            self._read = None
            self._started.set()

    def cancel(self) -> None:
        self._read = None
        self._started.set()

    def wait(self) -> None:
        """Waits for the update and the read.

        Raises:
            StorageError, CorruptStateError: One of them failed.
        """
        if not self._started.is_set():
            self._wait_for_update()
            self._started.wait()  # the callback comes right after
        if self._failure is not None:
            raise self._failure
        for transfer in self.transfers:
            transfer.wait()
        self.transfers = []

    def done(self) -> bool:
        return self._started.is_set() and all(transfer.done() for transfer in self.transfers)
