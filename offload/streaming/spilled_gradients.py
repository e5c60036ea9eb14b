"""Gradients that do not all fit in memory: in slots while they are used, else in spill files.

[Note: a shard's gradients leave when others come]
Backward completes one unit after the other. The gradients of a shard are in a slot while they
appear; when another shard needs one, those that are there are written, all but the latest. The
next micro-step and whoever looks at `p.grad` bring them back; the update reads them from storage,
record by record. Their sums of squares are taken on the way out, so that clipping reads nothing.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.errors import BudgetError, OffloadError, StoreError
from offload.layout import DTYPES, FlatShard, ModelLayout, PlacedParameter, Subgroup
from offload.memory import Slot, SlotPool, storage_over
from offload.optim.gradient import SumsOfSquares
from offload.plan.gradients import GradientPlan, gradient_dtype_of, subgroup_gradient_bytes
from offload.storage.spill import Place, Spill
from offload.storage.stalls import CHECKSUM, StallAccount
from offload.storage.store_paths import PathTicket


@dataclass(slots=True, eq=False)
class _Shard:
    """The gradients of one flat shard."""

    facts: FlatShard
    dtype: str
    subgroups: Sequence[Subgroup]
    pieces: dict[str, slice]
    """Bytes of each subgroup in a slot, up to the alignment."""
    settlers: list[Callable[[], None]] = field(default_factory=list)
    """Wait for what is on its way from the device."""
    slot: Slot[memoryview] | None = None
    flat: torch.Tensor | None = None
    num_storages: int = 0
    """Torch storages over the slot that are alive, `flat`'s among them."""
    is_dirty: bool = False
    """The slot has what the places have not."""
    leaving: list[tuple[Place, PathTicket]] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    """Of subgroups, by name."""
    written: set[str] = field(default_factory=set)
    """Parameters whose gradients are here."""
    sums: dict[str, float] = field(default_factory=dict)
    """Their sums of squares, where these are known."""


class SpilledGradients:
    """Keeps the gradients of some shards in a few slots and in spill files.

    Attributes:
        spill: The files.
        wait_s: For which threads waited for storage.

    Concurrency: Any thread; one at a time gets in.
    """

    def __init__(
        self,
        layout: ModelLayout,
        plan: GradientPlan,
        *,
        slots: SlotPool[memoryview],
        spill: Spill,
        stalls: StallAccount,
        sums_of_squares: SumsOfSquares,
        is_live: Callable[[FlatShard], bool],
    ) -> None:
        """Stores its arguments.

        Args:
            layout: Of the model.
            plan: Names the shards that are spilled.
            slots: Each as long as the largest of the shards needs.
            spill: Open, with places for the largest subgroup.
            stalls: Where each wait is added.
            sums_of_squares: For norms.
            is_live: Says whether any gradient of a shard is still to be seen or updated with.
        """
        self.spill = spill
        self.wait_s = 0.0
        self._stalls = stalls
        self._slots = slots
        self._sums_of_squares = sums_of_squares
        self._is_live = is_live
        self._takes_sums = False
        self._lock = threading.RLock()
        self._shards = {name: _shard_of(layout, name, plan.dtype) for name in plan.spilled}
        self._present: dict[str, _Shard] = {}  # those in a slot, the latest last
        self._subgroups = {
            s.name: shard for shard in self._shards.values() for s in shard.subgroups
        }

    def __contains__(self, shard_name: str) -> bool:
        return shard_name in self._shards

    def home(self, placed: PlacedParameter, shard_name: str) -> "SpilledGradient":
        """Returns where the gradient of a parameter of a spilled shard is."""
        return SpilledGradient(self, shard_name, placed)

    def dtype_of(self, shard_name: str) -> torch.dtype:
        """Returns the dtype in which the gradients of a shard accumulate."""
        dtype: torch.dtype = getattr(torch, self._shards[shard_name].dtype)
        return dtype

    def on_leaving(self, shard_name: str, settle: Callable[[], None]) -> None:
        """Has `settle` called before gradients of the shard are written."""
        self._shards[shard_name].settlers.append(settle)

    # What homes ask.

    def read(self, shard_name: str) -> torch.Tensor:
        """Returns the gradients of a shard, flat, for reading."""
        with self._lock:
            return self._bring(self._shards[shard_name])

    def write(self, shard_name: str, parameter: str, *, replaces: bool) -> torch.Tensor:
        """Returns the gradients of a shard, flat, for changing those of one parameter."""
        with self._lock:
            shard = self._shards[shard_name]
            if replaces and not self._is_live(shard.facts):
                self._forget(shard)
            flat = self._bring(shard)
            shard.is_dirty = True
            shard.written.add(parameter)
            shard.sums.pop(parameter, None)
            return flat

    def known_sum(self, shard_name: str, parameter: str) -> float | None:
        """Returns the sum of squares of a gradient, where it was taken on the way out."""
        with self._lock:
            self._takes_sums = True
            return self._shards[shard_name].sums.get(parameter)

    # What the update asks.

    def flush(self) -> None:
        """Writes what only slots have, so that everything can be read.

        Raises:
            StorageError: It could not be written.
        """
        with self._lock:
            present = list(self._present.values())
            for shard in present:
                self._start_leaving(shard, is_kept=True)
            for shard in present:
                self._end_leaving(shard)

    def start_reading(self, subgroup: Subgroup, into: memoryview) -> "SpilledRead":
        """Starts reading the gradients of a subgroup.

        Raises:
            StoreError: They are not on storage.
        """
        with self._lock:
            place = self._subgroups[subgroup.name].places.get(subgroup.name)
            if place is None:
                raise StoreError(
                    f"cannot update `{subgroup.name}`: expected its gradients on storage, found "
                    "none, since writing them failed; call `zero_grad()` and repeat the step"
                )
            return SpilledRead(self.spill, place, into, is_needed=False)

    def close(self) -> None:
        """Waits for what is under way; what is spilled is gone. May be called again."""
        with self._lock:
            self.spill.close()

    # Slots.

    def _bring(self, shard: _Shard) -> torch.Tensor:
        """Returns the shard's gradients in a slot, which is the latest now."""
        self._end_leaving(shard)
        self._present.pop(shard.facts.name, None)
        if shard.slot is None:
            shard.slot = self._fetch(shard, self._lease())
        self._present[shard.facts.name] = shard
        if shard.flat is None:
            num_bytes = shard.facts.num_elements * DTYPES[shard.dtype].itemsize
            shard.num_storages += 1
            base = storage_over(
                shard.slot.memory[:num_bytes], on_death=lambda: self._on_death(shard)
            )
            shard.flat = base.view(getattr(torch, shard.dtype))
        return shard.flat

    def _on_death(self, shard: _Shard) -> None:
        shard.num_storages -= 1

    def _fetch(self, shard: _Shard, slot: Slot[memoryview]) -> Slot[memoryview]:
        """Fills a slot, which is free again where that fails."""
        reads: list[tuple[Place, SpilledRead]] = []
        try:
            for name, place in shard.places.items():
                memory = slot.memory[shard.pieces[name]]
                reads.append((place, SpilledRead(self.spill, place, memory, is_needed=True)))
            self._wait(reads, "bringing spilled gradients back")
        except Exception:  # after an interrupt a read may be on its way: it has the slot
            with contextlib.suppress(OffloadError):  # the first error is on its way
                self._wait(reads, "bringing spilled gradients back")
            self._slots.release(slot)
            raise
        return slot

    def _lease(self) -> Slot[memoryview]:
        """Returns a free slot, and lets all who have one begin to leave theirs."""
        slot = self._slots.try_lease()
        for other in list(self._present.values()):
            if slot is None and self._start_leaving(other):
                slot = self._free(other)
        if slot is None:
            raise BudgetError(
                f"cannot take gradients: all {self._slots.num_slots} slots for spilled gradients "
                "are reached by tensors that point into `p.grad`; drop these, or raise "
                "`tiers.host.memory`"
            )
        for other in self._present.values():
            self._start_leaving(other)
        return slot

    def _free(self, shard: _Shard) -> Slot[memoryview] | None:
        self._end_leaving(shard)
        slot = shard.slot
        shard.slot = None
        del self._present[shard.facts.name]
        if slot is not None:
            self._slots.release(slot)
        return self._slots.try_lease()

    def _start_leaving(self, shard: _Shard, *, is_kept: bool = False) -> bool:
        """Starts writing what is not on storage; whether the slot is free after that.

        Args:
            shard: One that is in a slot.
            is_kept: Also where tensors of others point into the slot, which stays theirs.
        """
        for settle in shard.settlers:
            settle()
        shard.flat = None
        is_held = shard.num_storages > 0
        if shard.slot is None or (is_held and not is_kept):
            return False
        if shard.is_dirty:
            self._end_leaving(shard)
            if not is_held:  # else they may be written to after it
                self._take_sums(shard, shard.slot.memory)
            self._release_places(shard)
            for subgroup in shard.subgroups:
                memory = shard.slot.memory[shard.pieces[subgroup.name]]
                place, ticket = self.spill.write(memory, num_bytes=len(memory))
                shard.places[subgroup.name] = place
                shard.leaving.append((place, ticket))
            shard.is_dirty = is_held
        return not is_held

    def _end_leaving(self, shard: _Shard) -> None:
        tickets, shard.leaving = shard.leaving, []
        try:
            self._wait(tickets, "spilling gradients")
        except BaseException:
            shard.is_dirty = True
            raise

    def _wait(self, moves: Sequence[tuple[Place, "PathTicket | SpilledRead"]], cause: str) -> None:
        """Waits for all, also where one has failed: they use the slot's memory."""
        error: OffloadError | None = None
        for place, ticket in moves:
            started_s = time.perf_counter()
            is_there = isinstance(ticket, SpilledRead) and ticket.done()
            try:
                ticket.wait()
            except OffloadError as found:
                error = error or found
            duration_s = time.perf_counter() - started_s
            self.wait_s += duration_s
            self._stalls.add(
                CHECKSUM if is_there else self.spill.label_of(place), cause, duration_s
            )
        if error is not None:
            raise error

    def _take_sums(self, shard: _Shard, memory: memoryview) -> None:
        if not self._takes_sums:
            return
        flat = torch.frombuffer(memory, dtype=getattr(torch, shard.dtype))
        for placed in shard.facts.parameters:
            name = placed.facts.name
            if name in shard.written and name not in shard.sums:
                shard.sums[name] = self._sums_of_squares([flat[placed.start : placed.stop]], [])[0]

    def _forget(self, shard: _Shard) -> None:
        """Drops gradients that nobody asks for any more."""
        self._end_leaving(shard)
        self._release_places(shard)
        shard.written.clear()
        shard.sums.clear()
        shard.is_dirty = False

    def _release_places(self, shard: _Shard) -> None:
        for place in shard.places.values():
            self.spill.release(place)
        shard.places.clear()


class SpilledGradient:
    """Where one parameter's gradient is, as `GradientHome` says."""

    def __init__(self, owner: SpilledGradients, shard_name: str, placed: PlacedParameter) -> None:
        self._owner = owner
        self._shard = shard_name
        self._placed = placed

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._placed.facts.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._owner.dtype_of(self._shard)

    def read(self) -> torch.Tensor:
        return self._part(self._owner.read(self._shard))

    def write(self, *, replaces: bool = False) -> torch.Tensor:
        name = self._placed.facts.name
        return self._part(self._owner.write(self._shard, name, replaces=replaces))

    def known_sum(self) -> float | None:
        return self._owner.known_sum(self._shard, self._placed.facts.name)

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self._placed.start : self._placed.stop].view(self._placed.facts.shape)


class SpilledRead:
    """A piece on its way back; it is compared with what was written when it is waited for."""

    def __init__(self, spill: Spill, place: Place, into: memoryview, *, is_needed: bool) -> None:
        self._spill = spill
        self._place = place
        self._into = into
        self._ticket = spill.read(place, into, is_needed=is_needed)

    def wait(self) -> None:
        self._ticket.wait()
        self._spill.check(self._place, self._into)

    def done(self) -> bool:
        return self._ticket.done()

    def notify(self, event_fd: int | None) -> bool:
        return self._ticket.notify(event_fd)

    def waits_for(self) -> int | None:
        """Returns the number of the path that it waits for, None if it has ended."""
        return None if self._ticket.done() else self._place.path_index


def _shard_of(layout: ModelLayout, name: str, dtype: str) -> _Shard:
    facts, subgroups = layout.shards[name], layout.subgroups[name]
    own = gradient_dtype_of(facts, dtype)
    itemsize = DTYPES[own].itemsize
    pieces: Mapping[str, slice] = {
        s.name: slice(
            s.start * itemsize, s.start * itemsize + subgroup_gradient_bytes(layout, s, dtype)
        )
        for s in subgroups
    }
    return _Shard(facts=facts, dtype=own, subgroups=subgroups, pieces=dict(pieces))
