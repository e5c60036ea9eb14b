"""Where absent units live, and how they come from there into a slot."""

import gc
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import torch

from offload.devices import Copy, Device
from offload.errors import BudgetError, OffloadError
from offload.layout import ModelLayout, Subgroup, Unit
from offload.layout.units import TRANSFER_ALIGNMENT
from offload.memory import Slot, SlotPool, memory_of
from offload.optim.pipeline import parameter_key
from offload.storage.engine import Priority
from offload.storage.stalls import CHECKSUM, LINK, path_label
from offload.storage.store import BlockStore
from offload.storage.tickets import StoreTicket
from offload.streaming.parameter_tier import StoredTier
from offload.streaming.unit import Transfer, counted_bytes_of, quietly, start_all


class StoredUnits:
    """Reads and writes whole units of a layout in a block store."""

    def __init__(self, layout: ModelLayout, store: BlockStore) -> None:
        self._layout = layout
        self._store = store

    def can_prefetch(self) -> bool:
        """Returns True: a slot is all that a read needs."""
        return True

    def bytes_from_update(self, unit: Unit) -> int:
        """Returns 0: nothing is pending."""
        del unit
        return 0

    def wait_readable(self, unit: Unit) -> None:
        """Returns at once: what is stored is what should be."""

    def raise_failure(self) -> None:
        """Returns: no update runs beside."""

    def wait_updated(self, transfers: Sequence[Transfer]) -> None:
        """Returns at once: nothing is pending."""

    def settle(self) -> None:
        """Returns at once: an update writes other blocks than those that are read."""

    def waits_for(self, transfers: Sequence[Transfer]) -> str:
        """Returns the path that the first transfer which is not done is in flight on.

        Where all are done, what is left of a read is its checksums.
        """
        for transfer in transfers:
            if isinstance(transfer, StoreTicket) and (path := transfer.waits_for()) is not None:
                return path_label(self._store.roots[path])
        return CHECKSUM

    def wait_part(self, transfers: Sequence[Transfer]) -> bool:
        """Waits for one path of the first transfer that is in flight, False if none is."""
        return any(isinstance(each, StoreTicket) and each.wait_part() for each in transfers)

    @property
    def granule_bytes(self) -> int:
        """The smallest part of a subgroup that can be read: what one checksum covers."""
        return self._store.block_bytes

    def start_read(
        self, unit: Unit, into: torch.Tensor, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """Starts filling `into` with the unit, or `part` of its bytes, and returns at once."""
        return self.start_read_into(unit, memory_of(into), is_prefetch=is_prefetch, part=part)

    def start_read_into(
        self, unit: Unit, into: memoryview, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """As `start_read`, into host memory."""
        if part is not None:
            priority = Priority.PREFETCH if is_prefetch else Priority.NEEDED
            return start_all(self._read_part(unit, into, part, priority))
        return self.read_parts(self.parts(unit, into), is_prefetch=is_prefetch)

    def read_parts(
        self, parts: Sequence[tuple[Subgroup, memoryview]], *, is_prefetch: bool
    ) -> list[Transfer]:
        """Starts filling memory with each subgroup's parameters."""
        priority = Priority.PREFETCH if is_prefetch else Priority.NEEDED
        return start_all(
            self._store.read(parameter_key(subgroup), memory, priority=priority)
            for subgroup, memory in parts
        )

    def _read_part(
        self, unit: Unit, into: memoryview, part: range, priority: Priority
    ) -> Iterator[Transfer]:
        """Reads the part of each subgroup of a unit with one shard; `part` has whole granules."""
        for subgroup in self._layout.subgroups[unit.shards[0].name]:
            begin, num_bytes = subgroup.offset_bytes, subgroup.padded_parameter_bytes
            first, stop = max(part.start, begin), min(part.stop, begin + num_bytes)
            if first >= stop:
                continue
            yield self._store.read(
                parameter_key(subgroup),
                into[first - part.start : stop - part.start],
                offset=first - begin,
                num_bytes=None if stop == begin + num_bytes else stop - first,
                priority=priority,
            )

    def write(self, unit: Unit, source: torch.Tensor) -> None:
        """Writes the whole unit and waits."""
        self.write_from(unit, memory_of(source))

    def write_from(self, unit: Unit, source: memoryview) -> None:
        """Writes the whole unit from host memory and waits."""
        tickets = start_all(
            self._store.write(parameter_key(subgroup), memory, num_bytes=subgroup.parameter_bytes)
            for subgroup, memory in self.parts(unit, source)
        )
        for ticket in tickets:
            ticket.wait()

    def subgroups(self, unit: Unit) -> list[Subgroup]:
        """Returns what the unit is stored as."""
        return [each for shard in unit.shards for each in self._layout.subgroups[shard.name]]

    def parts(self, unit: Unit, memory: memoryview) -> list[tuple[Subgroup, memoryview]]:
        """Returns the subgroups of a unit, each with its place in `memory`."""
        parts: list[tuple[Subgroup, memoryview]] = []
        for shard in unit.shards:
            for subgroup in self._layout.subgroups[shard.name]:
                start = shard.offset_bytes + subgroup.offset_bytes
                parts.append((subgroup, memory[start : start + subgroup.padded_parameter_bytes]))
        return parts


class HostUnits:
    """Units that are resident in host memory and computed with on a device of its own memory."""

    def __init__(
        self, layout: ModelLayout, flat: Mapping[str, torch.Tensor], device: Device
    ) -> None:
        """Stores its arguments.

        Args:
            layout: Of the model.
            flat: The resident flat shards by name, each padded to the transfer alignment.
            device: Where the slots are.
        """
        self._layout = layout
        self._flat = flat
        self._device = device
        self._lock = threading.Lock()
        # In their order, from the first that may still read `flat`.
        self._copies: deque[Copy] = deque()

    def can_prefetch(self) -> bool:
        """Returns True: a slot is all that a copy needs."""
        return True

    def bytes_from_update(self, unit: Unit) -> int:
        """Returns 0: nothing is pending."""
        del unit
        return 0

    def wait_readable(self, unit: Unit) -> None:
        """Returns at once: what is in host memory is what should be."""

    def raise_failure(self) -> None:
        """Returns: no update runs beside."""

    def wait_updated(self, transfers: Sequence[Transfer]) -> None:
        """Returns at once: nothing is pending."""

    def settle(self) -> None:
        """Waits for every copy: one that computing follows may not have read its bytes yet.

        Raises:
            Exception: What the first copy that failed raises, once all are over and only once.
        """
        failure: Exception | None = None
        while (copy := self._oldest()) is not None:
            try:
                copy.synchronize()
            except Exception as error:  # noqa: BLE001 - the others may still read their bytes
                failure = failure or error
            self._forget(copy)  # not after an interrupt: it may go on
        if failure is not None:
            raise failure

    def waits_for(self, transfers: Sequence[Transfer]) -> str:
        """Returns `link`."""
        del transfers
        return LINK

    def wait_part(self, transfers: Sequence[Transfer]) -> bool:
        """Returns False: copies have no parts."""
        del transfers
        return False

    @property
    def granule_bytes(self) -> int:
        """The smallest part that is worth a copy."""
        return TRANSFER_ALIGNMENT

    def start_read(
        self, unit: Unit, into: torch.Tensor, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """Starts copying the unit, or `part` of its bytes, into its slot and returns at once."""
        del is_prefetch
        if part is not None:
            source = memory_of(self._flat[unit.shards[0].name])[part.start : part.stop]
            return [self._copy_in(source, into)]
        transfers: list[Transfer] = []
        for shard in unit.shards:
            stop = shard.offset_bytes + shard.num_bytes
            source = memory_of(self._flat[shard.name])[: shard.num_bytes]
            transfers.append(self._copy_in(source, into[shard.offset_bytes : stop]))
        return transfers

    def write_from(self, unit: Unit, source: memoryview) -> None:
        """Copies the whole unit from other host memory."""
        self.settle()
        for shard in unit.shards:
            into = memory_of(self._flat[shard.name])[: shard.num_bytes]
            into[:] = source[shard.offset_bytes : shard.offset_bytes + shard.num_bytes]

    def write(self, unit: Unit, source: torch.Tensor) -> None:
        """Copies the whole unit from its slot into host memory and waits."""
        copies: list[Copy] = []
        for shard in unit.shards:
            stop = shard.offset_bytes + shard.num_bytes
            into = self._flat[shard.name].view(torch.uint8)[: shard.num_bytes]
            copies.append(self._device.copy_out(source[shard.offset_bytes : stop], into))
        for copy in copies:
            copy.synchronize()

    def _oldest(self) -> Copy | None:
        with self._lock:
            return self._copies[0] if self._copies else None

    def _forget(self, copy: Copy) -> None:
        with self._lock:
            if self._copies and self._copies[0] is copy:  # else it was done, and is forgotten
                self._copies.popleft()

    def _copy_in(self, source: memoryview, into: torch.Tensor) -> Copy:
        copy = self._device.copy_in(source, into)
        with self._lock:
            while self._copies and self._copies[0].done():
                self._copies.popleft()
            self._copies.append(copy)
        return copy


@runtime_checkable
class Awaited(Protocol):
    """A transfer that an update holds back."""

    def join(self) -> None:
        """Waits for it without asking for the update."""
        ...


class StagedUnits:
    """Units on storage that are computed with on a device of its own memory.

    A fetch has three stages: storage to a staging slot in host memory, from there to the slot on
    the device, computing. The stages of different units overlap: a thread waits for the reads in
    turn and starts each copy as its read is done.

    Concurrency: One thread calls.
    """

    def __init__(self, stored: StoredTier, staging: SlotPool[memoryview], device: Device) -> None:
        self._stored = stored
        self._staging = staging
        self._device = device
        self._in_flight: deque[_StagedRead] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-staging")

    def close(self) -> None:
        """Waits for what is in flight, whatever it gives."""
        self._executor.shutdown()
        self.drain()

    def drain(self) -> None:
        """Waits until every staging slot is free."""
        while self._in_flight:
            self._end_first()

    def bytes_from_update(self, unit: Unit) -> int:
        """As storage has it."""
        return self._stored.bytes_from_update(unit)

    def wait_readable(self, unit: Unit) -> None:
        """Waits until the stored bytes are what they should be."""
        self._stored.wait_readable(unit)

    def settle(self) -> None:
        """As storage has it: staging slots are of reads alone."""
        self._stored.settle()

    def raise_failure(self) -> None:
        """As storage has it."""
        self._stored.raise_failure()

    def wait_updated(self, transfers: Sequence[Transfer]) -> None:
        """Waits until no update holds the transfers back, nor those that the thread takes before.

        Raises:
            StorageError, CorruptStateError: An update failed.
        """
        for read in self._in_flight:
            if not read.is_read():
                self._stored.wait_updated(read.reads)
            if read in transfers:
                return

    def waits_for(self, transfers: Sequence[Transfer]) -> str:
        """Returns `link` if the bytes are in host memory, else what their reads wait for."""
        for transfer in transfers:
            if isinstance(transfer, _StagedRead) and not transfer.is_read():
                return self._stored.waits_for(transfer.reads)
        return LINK

    def wait_part(self, transfers: Sequence[Transfer]) -> bool:
        """Waits for one path of the first read, or for its checksums, False where all are read."""
        for transfer in transfers:
            if isinstance(transfer, _StagedRead) and not transfer.is_read():
                if not self._stored.wait_part(transfer.reads):
                    transfer.wait_read()
                return True
        return False

    def can_prefetch(self) -> bool:
        """Returns whether a staging slot is free."""
        self._reap()
        return self._staging.num_free > 0

    @property
    def granule_bytes(self) -> int:
        """As storage has it."""
        return self._stored.granule_bytes

    def start_read(
        self, unit: Unit, into: torch.Tensor, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """Starts the first stage; waits for a staging slot if none is free."""
        slot = self._take_slot(unit)
        memory = slot.memory[: len(into)]
        try:
            reads = self._stored.start_read_into(unit, memory, is_prefetch=is_prefetch, part=part)
        except Exception:  # after an interrupt a read may be on its way
            self._staging.release(slot)
            raise
        read = _StagedRead(slot, reads, memory, into)
        try:
            self._in_flight.append(read)  # before the thread has it, as the slot is the copy's then
            self._executor.submit(self._copy_when_read, read)
        except BaseException:  # an interrupt too: the thread may have it or not
            if read.try_cancel():
                self._in_flight.remove(read)  # a storage read may be on its way: it has the slot
            raise
        return [read]

    def write(self, unit: Unit, source: torch.Tensor) -> None:
        """Writes the whole unit through a staging slot and waits."""
        slot = self._take_slot(unit)
        with self._staging.releasing(slot):
            memory = slot.memory[: unit.num_bytes]
            into = torch.frombuffer(memory, dtype=torch.uint8)
            self._device.copy_out(source, into).synchronize()
            self._stored.write_from(unit, memory)

    def write_from(self, unit: Unit, source: memoryview) -> None:
        """Writes the whole unit from host memory and waits."""
        self._stored.write_from(unit, source)

    def _copy_when_read(self, read: "_StagedRead") -> None:
        if not read.try_begin():
            return
        memory, into = read.take()
        copy: Copy | None = None
        failure: BaseException | None = None
        for each in read.reads:
            try:
                each.join() if isinstance(each, Awaited) else each.wait()
            except OffloadError as error:  # the others may still write to the slot
                failure = failure or error
        if failure is None:
            try:
                copy = self._device.copy_in(memory, into)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the unit gets it
                failure = error
        read.end(copy, failure)
        # Slots must not live as long as the error, which has this frame and those that called it.
        del memory, into, read, failure

    def _take_slot(self, unit: Unit) -> Slot[memoryview]:
        self._reap()
        slot = self._staging.try_lease()
        while slot is None:
            if self._in_flight:
                self._end_first()
            elif not gc.collect():  # of what an interrupt left behind
                raise self._stuck(unit)
            slot = self._staging.try_lease()
        return slot

    def _stuck(self, unit: Unit) -> BudgetError:
        return BudgetError(
            f"cannot move unit `{unit.name}`: expected a free staging slot, found all "
            f"{self._staging.num_slots} taken and nothing in flight, as after an interrupt; close "
            "the session and resume from the last commit"
        )

    def _reap(self) -> None:
        while self._in_flight and self._in_flight[0].done():
            self._end_first()

    def _end_first(self) -> None:
        read = self._in_flight[0]  # an interrupt of the waits leaves it there
        with quietly(Exception):
            if not read.is_read():
                self._stored.wait_updated(read.reads)
        with quietly(Exception):  # whoever waits for the unit gets the error
            read.synchronize()
        self._in_flight.popleft()
        self._staging.release(read.slot)


class _StagedRead:
    """A unit between storage and device."""

    def __init__(
        self,
        slot: Slot[memoryview],
        reads: list[Transfer],
        memory: memoryview,
        into: torch.Tensor,
    ) -> None:
        self.slot = slot
        self.reads = reads
        self._ends: list[tuple[memoryview, torch.Tensor]] = [(memory, into)]
        self._copy: Future[Copy] = Future()

    def try_cancel(self) -> bool:
        """Has no copy begin; returns False if the thread has begun."""
        is_cancelled = self._copy.cancel()
        if is_cancelled:
            self._ends.clear()
        return is_cancelled

    def try_begin(self) -> bool:
        """Returns whether the thread is to copy what is read."""
        return self._copy.set_running_or_notify_cancel()

    def take(self) -> tuple[memoryview, torch.Tensor]:
        """Returns the memory in which the bytes are read and that to which they go, once."""
        return self._ends.pop()

    def end(self, copy: Copy | None, failure: BaseException | None) -> None:
        """Takes the copy that was started, or why none was."""
        if copy is not None:
            self._copy.set_result(copy)
        else:
            self._copy.set_exception(failure)

    @property
    def counted_bytes(self) -> int:
        return counted_bytes_of(self.reads)

    def is_read(self) -> bool:
        """Returns whether the bytes are in host memory."""
        return self._copy.done()

    def wait_read(self) -> None:
        """Waits until the bytes are in host memory; does not raise what the read gave."""
        futures.wait([self._copy])

    def wait(self) -> None:
        """Waits until computing may follow, or raises what the read gave."""
        self._copy.result().wait()

    def synchronize(self) -> None:
        """Waits until the staging slot is free of the copy."""
        self._copy.result().synchronize()

    def done(self) -> bool:
        if not self._copy.done():
            return False
        return self._copy.exception() is not None or self._copy.result().done()
