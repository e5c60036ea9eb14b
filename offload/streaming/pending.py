"""Units whose parameters a pending update still has to write."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from offload.layout import ModelLayout, Subgroup, Unit
from offload.memory import memory_of
from offload.optim.deferred import DeferredUpdates
from offload.optim.handover import HandedOver
from offload.streaming.tier import HostUnits, StoredUnits
from offload.streaming.unit import Transfer, counted_bytes_of, start_all


class PendingUnits:
    """A tier over another one, which gives no bytes of a unit before their update is done.

    What is stored is not read if its update is still to be computed: that fills the slot.
    """

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

    def bytes_from_update(self, unit: Unit) -> int:
        """Returns how much of memory given to the unit now would be filled by its update."""
        if not isinstance(self._tier, StoredUnits):
            return 0
        return sum(
            subgroup.padded_parameter_bytes
            for subgroup in self._tier.subgroups(unit)
            if self._deferred.is_to_come(subgroup.name)
        )

    def wait_readable(self, unit: Unit) -> None:
        """Waits until no update of the unit is pending.

        Raises:
            StorageError, CorruptStateError: The update failed.
        """
        self._deferred.wait_for(self._numbers[unit.name])

    def settle(self) -> None:
        """As the tier has it."""
        self._tier.settle()

    def raise_failure(self) -> None:
        """Raises what ended the updates, if they failed."""
        self._deferred.raise_failure()

    def wait_updated(self, transfers: Sequence[Transfer]) -> None:
        """Waits until no update holds the transfers back.

        Raises:
            StorageError, CorruptStateError: The update failed.
        """
        for transfer in transfers:
            if isinstance(transfer, LateRead):
                transfer.wait_started()
            elif isinstance(transfer, HandedOver):
                transfer.wait()

    def waits_for(self, transfers: Sequence[Transfer]) -> str:
        """Returns what the tier does, of reads that were late too."""
        return self._tier.waits_for(_plain(transfers))

    def wait_part(self, transfers: Sequence[Transfer]) -> bool:
        """As the tier does, of reads that were late too."""
        return self._tier.wait_part(_plain(transfers))

    @property
    def granule_bytes(self) -> int:
        """As the tier has it."""
        return self._tier.granule_bytes

    def start_read(
        self, unit: Unit, into: torch.Tensor, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """Starts filling `into`; what is needed now waits for what updates have to write first.

        Raises:
            StorageError, CorruptStateError: The update failed.
        """
        tier = self._tier
        if isinstance(tier, StoredUnits):
            return self.start_read_into(unit, memory_of(into), is_prefetch=is_prefetch, part=part)
        return self._when_updated(
            unit,
            is_prefetch,
            lambda is_ahead: tier.start_read(unit, into, is_prefetch=is_ahead, part=part),
        )

    def start_read_into(
        self, unit: Unit, into: memoryview, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """As `start_read`, into host memory, from storage or from the updates."""
        tier = self._tier
        assert isinstance(tier, StoredUnits)
        if part is not None:
            return self._when_updated(
                unit,
                is_prefetch,
                lambda is_ahead: tier.start_read_into(unit, into, is_prefetch=is_ahead, part=part),
            )
        return start_all(self._start_parts(tier, unit, into, is_prefetch))

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

    def _start_parts(
        self, tier: StoredUnits, unit: Unit, into: memoryview, is_prefetch: bool
    ) -> Iterator[Transfer]:
        late: list[tuple[Subgroup, memoryview]] = []
        for subgroup, memory in tier.parts(unit, into):
            handed = self._deferred.hand_over(subgroup.name, memory)
            if handed is not None:
                yield handed
            elif self._deferred.is_written(subgroup.name):
                yield from tier.read_parts([(subgroup, memory)], is_prefetch=is_prefetch)
            else:
                late.append((subgroup, memory))
        if late:
            yield from self._when_updated(
                unit, is_prefetch, lambda is_ahead: tier.read_parts(late, is_prefetch=is_ahead)
            )

    def _when_updated(
        self, unit: Unit, is_prefetch: bool, read: Callable[[bool], list[Transfer]]
    ) -> list[Transfer]:
        """Starts what `read` starts, ahead of use or not, when no update of the unit is pending."""
        number = self._numbers[unit.name]
        if is_prefetch and not self._deferred.is_updated(number):
            late = LateRead(read, wait_for=lambda asks: self._deferred.wait_for(number, asks=asks))
            self._late.add(late)
            self._deferred.when_updated(number, late.start)
            return [late]
        self._deferred.wait_for(number)
        return read(is_prefetch)


def _plain(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Returns the transfers themselves of reads that were late."""
    found: list[Transfer] = []
    for transfer in transfers:
        found += transfer.transfers if isinstance(transfer, LateRead) else [transfer]
    return found


class LateRead:
    """A prefetch that starts when the update of its unit is done.

    Ownership: Once `wait` has returned this refers to the memory no more, so that its slot is free
        when the unit leaves it, wherever a reference to this is left.
    Concurrency: `start` in the updates' thread, the rest in any other.
    """

    def __init__(
        self,
        read: Callable[[bool], list[Transfer]],
        *,
        wait_for: Callable[[bool], float],
    ) -> None:
        """Stores its arguments.

        Args:
            read: Starts the read, given whether nobody waits for it yet.
            wait_for: Waits for the update, and asks for it if told so.
        """
        self._read: Callable[[bool], list[Transfer]] | None = read
        self._wait_for = wait_for
        self._is_ahead = True
        self._started = threading.Event()
        self.transfers: list[Transfer] = []
        self.counted_bytes = 0
        self._failure: BaseException | None = None

    def start(self) -> None:
        try:
            if self._read is not None:
                self.transfers = self._read(self._is_ahead)
                self.counted_bytes = counted_bytes_of(self.transfers)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, not in the updates
            self._failure = error
        finally:
            self._read = None
            self._started.set()

    def cancel(self) -> None:
        self._read = None
        self._started.set()

    def wait_started(self) -> None:
        """Waits for the update, after which the read is one that is needed now.

        Raises:
            StorageError, CorruptStateError: The update failed.
        """
        if not self._started.is_set():
            self._is_ahead = False
            self._wait_for(True)
            self._started.wait()  # the callback comes right after

    def join(self) -> None:
        """As `wait`, but leaves update and read their time."""
        if not self._started.is_set():
            self._wait_for(False)
            self._started.wait()
        self.wait()

    def wait(self) -> None:
        """Waits for the update and the read.

        Raises:
            StorageError, CorruptStateError: One of them failed.
        """
        self.wait_started()
        if self._failure is not None:
            raise self._failure
        for transfer in self.transfers:
            transfer.wait()
        self.transfers = []

    def done(self) -> bool:
        return self._started.is_set() and all(transfer.done() for transfer in self.transfers)
