"""Which units are in memory: fetch, hold, prefetch, evict.

See [Note: a slot belongs to a storage object] in `offload.memory.storages`: evicting a unit only
drops the engine's own views; the slot comes back when the last alias of it is gone.
"""

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.devices import CpuDevice, Device
from offload.errors import BudgetError
from offload.memory import SlotPool, memory_of
from offload.plan.keeping import Keeping
from offload.sizes import format_size
from offload.storage.stalls import StallAccount
from offload.streaming.edit_watch import make_watch
from offload.streaming.graph_moments import Thread, this_thread
from offload.streaming.messages import no_slot_message
from offload.streaming.parameter_tier import ParameterTier
from offload.streaming.part_reads import PartReads
from offload.streaming.prefetch_distance import PrefetchDistance
from offload.streaming.residency_counters import ResidencyCounters
from offload.streaming.torch_private import is_in_backward
from offload.streaming.trace import NEVER, AccessTrace, access_of
from offload.streaming.transfer_waits import wait_by_parts
from offload.streaming.unit import (
    Binding,
    CopyState,
    Edit,
    StreamedUnit,
    Transfer,
    counted_bytes_of,
    filling_slots,
    quietly,
    require_untouched,
    wait_quietly,
)
from offload.streaming.unit_slots import UnitSlots


class Residency:
    """Brings units into slots and takes them out again, within the pool's budget.

    Attributes:
        parts: Reads wide units in pieces.

    Concurrency: The thread that runs the model; slots may come back from any thread.
    """

    def __init__(
        self,
        units: Sequence[StreamedUnit],
        *,
        pool: SlotPool[Any],
        tier: ParameterTier,
        prefetch_distance: int,
        on_edit: Callable[[Sequence[Edit]], None],
        device: Device | None = None,
        stalls: StallAccount | None = None,
        on_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._stalls = stalls
        self._on_backward = on_backward  # called as backward comes to another unit
        self.units = units
        self.trace = AccessTrace()
        self.counters = ResidencyCounters()
        self.threads: set[Thread] = set()  # that have made graphs, but for backward's
        self._slots = UnitSlots(
            units,
            pool=pool,
            device=CpuDevice() if device is None else device,
            next_use=self.trace.next_use,
            evict=self.evict,
        )
        self.num_slots, self.slot_bytes = pool.num_slots, pool.slot_bytes
        self._keeping = Keeping(num_slots=pool.num_slots)
        self._device = CpuDevice() if device is None else device
        self._watch = make_watch(len(units), self._device, slot_bytes=pool.slot_bytes)
        self._tier = tier
        self.parts = PartReads(
            tier, self._device, slots=self._slots, take_slot=self._take_slot, wait=self._wait
        )
        self._distance = PrefetchDistance(least=prefetch_distance, most=pool.num_slots - 1)
        self._on_edit = on_edit
        # By the address of its slot: which unit a tensor seen by autograd belongs to.
        self._by_address: dict[int, StreamedUnit] = {}
        # Units that were accessed in this pass outside their modules' calls.
        self._accessed: set[int] = set()
        # Accessed last, and perhaps still in use by an operation of backward.
        self._current: StreamedUnit | None = None
        # The same if no call holds it: its use ends as that of another unit begins.
        self._in_use: StreamedUnit | None = None
        self._used_since_s: float | None = None

    def unit_of(self, tensor: torch.Tensor) -> StreamedUnit | None:
        """Returns the resident unit whose slot holds `tensor`, if any."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    @property
    def ahead_read_bytes(self) -> int:
        """What the store has counted of units that were fetched ahead and are still to be used."""
        ahead = (unit for unit in self.units if unit.state is CopyState.FETCHING)
        return sum(counted_bytes_of(unit.transfers) for unit in ahead)

    def hold(self, index: int) -> None:
        """Fetches a unit and keeps it from eviction until `release_hold`."""
        unit = self.units[index]
        if unit.num_holds == 0 or unit.state is not CopyState.CLEAN:
            self.fetch(unit)
        if unit.num_holds == 0:
            unit.note_references()
            self._in_use = None
        unit.num_holds += 1

    def release_hold(self, index: int, *, evict: bool) -> None:
        """Ends one hold; with `evict` a unit that nobody else holds or keeps leaves its slot."""
        unit = self.units[index]
        unit.num_holds -= 1
        if unit.num_holds or unit.state is not CopyState.CLEAN:
            return
        if evict:
            unit.find_kept()
            self._leave(unit)
        else:
            self._in_use = unit

    def access(self, index: int, parameter_id: int) -> None:
        """Fetches a unit of which a parameter is used outside its modules' calls.

        It may leave its slot once nobody refers to the parameter any more.
        """
        unit = self.units[index]
        self._accessed.add(index)
        if unit is not self._in_use or unit.state is not CopyState.CLEAN:
            self.fetch(unit)
        unit.note_access(parameter_id)

    def begin_pass(self, *, is_evaluation: bool) -> None:
        """Begins a forward; what an earlier pass left in slots goes, so that bytes are as planned.

        What is prefetched stays, between two forwards what is among the next, and after a backward
        the unit that it used last if the forward begins with it: that has no time to come again.
        """
        self._accessed.clear()
        if is_evaluation:  # no step may follow
            self._watch.raise_changed(self.units)
        for unit in self.units:
            unit.num_holds = 0  # what a call that was interrupted left behind
        self.trace.begin(is_evaluation=is_evaluation)
        staying = self._staying(None)
        if not self.trace.is_in_forward:
            self._used_since_s = None
            first, current = next(self.trace.upcoming(), None), self._current
            staying = {first} if current is not None and current.index == first else set()
        for unit in self.units:
            if unit.was_used and unit.index not in staying and not unit.kept_names:
                self.evict(unit)

    def end_pass(self) -> None:
        """Ends a forward; units accessed outside their modules' calls leave their slots."""
        for index in sorted(self._accessed):
            if self.units[index].num_holds == 0 and self.units[index].state is CopyState.CLEAN:
                self._leave(self.units[index])
        self._accessed.clear()
        self.trace.end()

    def _leave(self, unit: StreamedUnit) -> None:
        """Evicts a unit whose use has ended, unless someone keeps a parameter of it.

        One that is among the next that the trace predicts, as many as there are slots, stays: the
        last units of forward are there for backward. A slot that came free takes what comes next.
        """
        if unit.kept_names:
            return
        if not self._stays(unit):
            self.evict(unit)
        self.prefetch()

    def _begin_use(self, unit: StreamedUnit) -> None:
        """Ends the use of the unit before, if no call held it: it leaves, unless it is to stay.

        One that is not predicted to be used again leaves when its slot is needed.
        """
        ended, self._in_use = self._in_use, unit
        if ended is None or ended is unit or ended.state is not CopyState.CLEAN:
            return
        is_predicted = self.trace.next_use(ended.index) != NEVER
        stays = self._stays(ended, first=unit) or ended.num_holds > 0 or ended.kept_names
        if is_predicted and not stays:
            self.evict(ended)

    def _stays(self, unit: StreamedUnit, *, first: StreamedUnit | None = None) -> bool:
        """Returns whether `unit` is one of `_staying`, at once where there is a slot for each."""
        if self.num_slots >= len(self.units):
            return unit is first or self.trace.next_use(unit.index) != NEVER
        return unit.index in self._staying(first)

    def _staying(self, first: StreamedUnit | None) -> set[int]:
        """Returns the next units, one for each slot: `first`, if there is one, comes first."""
        following = self.trace.upcoming()
        if first is not None:
            following = itertools.chain([first.index], following)
        held = [unit.index for unit in self.units if unit.num_holds > 0 and unit is not first]
        return self._keeping.staying(following, held=held)

    def fetch(
        self, unit: StreamedUnit, *, is_backward: bool = False, is_recorded: bool = True
    ) -> torch.Tensor:
        """Returns the bytes of `unit`, in its slot, fetching them if they are not there.

        Args:
            is_backward: Asked for by a saved tensor.
            is_recorded: Part of a pass, not a look from outside.

        Raises:
            BudgetError: Every slot is held or reached by a tensor, and no update failed.
            StorageError, CorruptStateError: The bytes could not be read, or an update failed.
        """
        if is_recorded and unit.is_wide:
            raise BudgetError(
                f"cannot use `{unit.name}` ({format_size(unit.layout.num_bytes)}) here: it exceeds "
                "its slot, so only calls of the linear layer or the embedding that owns it can use "
                f"it, in pieces; raise `tiers.{self._tier_name}.memory` so that it fits"
            )
        # What is computed again asks by calls.
        in_backward = is_backward or is_in_backward()
        if torch.is_grad_enabled() and not in_backward:
            self.threads.add(this_thread())
        if is_recorded:
            self.trace.record(access_of(unit.index, is_backward=is_backward))
            self._note_use(unit)
            if in_backward and unit is not self._current:
                self._on_backward()
        if unit.state is not CopyState.CLEAN:
            with filling_slots():
                self._bring(unit)
        elif is_recorded and unit.was_looked_at:
            unit.was_looked_at = False
            self.capture_edits(unit)
        unit.was_used = True
        self._current = unit
        if is_recorded:
            self._begin_use(unit)
            self.prefetch()
            self._used_since_s = time.perf_counter()
        elif unit.hashes is None:  # who looks may write through `parameter.data`
            self._watch.end(unit)
            self._watch.begin(unit)
            unit.note_hashes()
        assert unit.base is not None
        return unit.base

    def _note_use(self, following: StreamedUnit) -> None:
        """Notes how long the unit before `following` was in use."""
        current, since_s = self._current, self._used_since_s
        if current is not None and since_s is not None and current is not following:
            duration_s = time.perf_counter() - since_s
            self._distance.note_use(current.layout.num_bytes, duration_s=duration_s)

    def _bring(self, unit: StreamedUnit) -> None:
        """Ends the fetch of an absent unit, which begins now if it was not fetched ahead."""
        was_ahead = unit.state is CopyState.FETCHING
        was_complete = was_ahead and all(transfer.done() for transfer in unit.transfers)
        if unit.is_wide:
            self._tier.wait_readable(unit.layout)
            self._take_whole(unit)
        elif not was_ahead:
            self._start_fetch(unit, self._take_slot(unit, unit.layout.num_bytes), is_prefetch=False)
        if unit.is_updated:
            self.counters.updated_in_place += 1
        else:
            self.counters.accesses += 1
            self.counters.prefetch_hits += was_complete
        self._finish_fetch(unit)
        if was_ahead and not unit.is_updated:
            within_s = time.perf_counter() - unit.fetched_since_s
            self._distance.note_fetch(
                unit.layout.num_bytes, within_s=within_s, was_late=not was_complete
            )

    def look(self, index: int, parameter_id: int) -> None:
        """Fetches a unit for a look at a parameter from outside a pass."""
        unit = self.units[index]
        self.fetch(unit, is_recorded=False)
        unit.was_looked_at = True
        unit.note_look(parameter_id)

    def copy_of(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's values in host memory of their own, which no budget covers.

        Raises:
            StoreError: The user wrote to the parameter while it was absent.
        """
        unit = self.units[index]
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        if unit.is_wide and unit.state is CopyState.ABSENT:  # the device may not hold it
            require_untouched(unit.bindings, reads_values=True)
            with filling_slots():
                self.parts.copy_whole(unit, values.view(-1).view(torch.uint8))
        else:
            self.look(index, id(parameter))
            self._device.copy_out(parameter.detach(), values).synchronize()
        return values

    def prefetch(self) -> None:
        """Starts fetching what the trace predicts next, as far as slots allow.

        What an update is still to write has its slot as early as there is one: then it is not read.
        """
        if CopyState.ABSENT in [unit.state for unit in self.units]:
            with filling_slots():
                self._start_ahead()

    def _start_ahead(self) -> None:
        distance, current = self._distance.units, self._current
        in_use = current if current is not None and current.state is CopyState.CLEAN else None
        staying, ahead = self._staying(in_use), 0
        for index in self.trace.upcoming():
            if index not in staying:
                return
            unit = self.units[index]
            is_near, ahead = ahead < distance, ahead + 1
            if unit.state is not CopyState.ABSENT or unit.is_wide:
                continue
            if not (is_near or self._tier.bytes_from_update(unit.layout)):
                continue  # there is a slot for it later
            if not self._tier.can_prefetch():
                return
            next_use = self.trace.next_use(index)
            memory = self._slots.try_take(unit.layout.num_bytes, needed_at=next_use, keep=staying)
            if memory is None:
                return
            self._start_fetch(unit, memory, is_prefetch=True)
            self.counters.prefetches += 1

    def note_wide(self, unit: StreamedUnit, *, is_backward: bool) -> None:
        """Records that a call uses a wide unit; waits for its update."""
        self.trace.record(access_of(unit.index, is_backward=is_backward))
        self._begin_use(unit)
        self._tier.wait_readable(unit.layout)

    def _take_whole(self, unit: StreamedUnit) -> None:
        base = self.parts.read_whole(unit)
        unit.move_to(CopyState.FETCHING)
        unit.base = base

    def evict(self, unit: StreamedUnit) -> None:
        """Takes `unit` out of its slot; what the user edited is written back first."""
        if unit.state is CopyState.ABSENT:
            return
        if unit.state is CopyState.FETCHING:
            with quietly():
                self._tier.wait_updated(unit.transfers)
            wait_quietly(unit.transfers)  # nobody asks for these bytes any more
        else:
            self.capture_edits(unit)
            self._watch.end(unit)
        self._drop(unit)
        self.counters.evictions += 1

    def evict_all(self) -> None:
        """Takes every unit out of its slot; what they came from may change. None may be held.

        Raises:
            StoreError: The user wrote to a parameter while it was absent, or in a way that is lost.
        """
        self._used_since_s = None
        for unit in self.units:
            self.evict(unit)
        self._require_no_lost_edit(reads_values=self._device.computes_later)
        self._tier.settle()
        self._watch.raise_changed(self.units)

    def settle_edits(self) -> None:
        """Writes back what the user changed of units in slots, which stay there.

        Raises:
            StoreError: As of `evict_all`.
        """
        for unit in self.units:
            self.capture_edits(unit)
            if unit.state is CopyState.CLEAN:
                self._watch.end(unit)
                self._watch.begin(unit)
        self._require_no_lost_edit(reads_values=True)
        self._watch.raise_changed(self.units)

    def _require_no_lost_edit(self, *, reads_values: bool) -> None:
        absent: list[Binding] = []
        present: list[Binding] = []
        for unit in self.units:
            (present if unit.state is CopyState.CLEAN else absent).extend(unit.bindings)
        require_untouched(absent, reads_values=reads_values, present=present)

    def see_versions(self) -> None:
        """Takes the version counters of parameters as seen."""
        for unit in self.units:
            for binding in unit.bindings:
                binding.see_version()

    def evict_unheld(self) -> None:
        """Takes every unit that nobody holds or keeps out of its slot."""
        for unit in self.units:
            if unit.num_holds == 0 and not unit.kept_names:
                self.evict(unit)

    def capture_edits(self, unit: StreamedUnit) -> None:
        """Writes a resident unit back if the user changed a parameter of it in place."""
        if unit.state is not CopyState.CLEAN or unit.base is None:
            return
        edits = unit.edits()
        if not edits:
            return
        with filling_slots():
            if unit.is_wide:
                self._tier.write_from(unit.layout, memory_of(unit.base.cpu()))
            else:
                self._tier.write(unit.layout, unit.base)
        self._on_edit(edits)  # first: what was seen is not found again after an interrupt
        unit.see_edits(edits)
        self._watch.begin(unit)

    def _start_fetch(self, unit: StreamedUnit, base: torch.Tensor, *, is_prefetch: bool) -> None:
        try:
            unit.move_to(CopyState.FETCHING)
            unit.base = base
            unit.was_used = unit.was_looked_at = False
            unit.fetched_since_s = time.perf_counter()
            from_update_bytes = self._tier.bytes_from_update(unit.layout)
            unit.is_updated = from_update_bytes == unit.layout.num_bytes > 0
            unit.transfers = self._tier.start_read(unit.layout, base, is_prefetch=is_prefetch)
        except BaseException:  # an interrupt too: what has no transfers would be taken for fetched
            del base
            self._drop(unit)
            raise

    def _finish_fetch(self, unit: StreamedUnit) -> None:
        try:
            self._wait(unit.transfers, "fetching a unit")
            # Where reading would wait for all that is computed, it is left to `evict_all`.
            require_untouched(unit.bindings, reads_values=not self._device.computes_later)
            assert unit.base is not None
            if unit.base.numel():
                self._by_address[unit.base.data_ptr()] = unit
            unit.show(is_hashed=self._device.is_unified)
            self._watch.begin(unit)
        except BaseException:
            wait_quietly(unit.transfers)  # the others may still write to the slot
            self._drop(unit)
            raise

    def _wait(self, transfers: Sequence[Transfer], cause: str) -> None:
        """Waits for transfers, and counts each part of a wait as one for what it was for.

        Those for updates are counted where these run.
        """
        self._tier.wait_updated(transfers)
        waited_s = wait_by_parts(self._tier, transfers)
        self.counters.io_wait_s += sum(waited_s.values())
        if self._stalls is not None:
            for waits_for, duration_s in waited_s.items():
                self._stalls.add(waits_for, cause, duration_s)

    def _drop(self, unit: StreamedUnit) -> None:
        try:
            self._take_out(unit)
        except BaseException:  # an interrupt: half a unit would be taken for a whole one
            self._take_out(unit)
            raise

    def _take_out(self, unit: StreamedUnit) -> None:
        if unit.base is not None and unit.base.numel():
            self._by_address.pop(unit.base.data_ptr(), None)
        unit.leave_slot()

    def _take_slot(self, unit: StreamedUnit, num_bytes: int) -> torch.Tensor:
        memory = self._slots.try_take(num_bytes)
        if memory is None:
            gc.collect()
            memory = self._slots.try_take(num_bytes)
        if memory is None:
            self._tier.raise_failure()  # what failed may be why slots are not free
            message = no_slot_message(unit, self.units, self.num_slots, tier=self._tier_name)
            raise BudgetError(message)
        return memory

    @property
    def _tier_name(self) -> str:
        return "host" if self._device.is_unified else "device"
