"""Saved activations between forward and backward: on their way out, away, and on their way back.

[Note: activations move by storage]
What is moved is a whole storage, cut into pieces of one slot each. Tensors that share a storage
share the copy, as they shared the memory. The original is kept until the copy is where it belongs;
what is asked for before that is simply still there.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import torch

from offload.devices import Copy, Device
from offload.errors import BudgetError, StorageError, StoreError
from offload.memory import Slot, SlotPool
from offload.storage.spill import Place, Spill
from offload.storage.stalls import CHECKSUM, LINK, StallAccount

_log = logging.getLogger("offload.streaming")

STORAGES_UNDER_WAY = 2
"""So many times the largest storage may be on its way in each direction at one time: one that
moves while the next is computed. More would be memory that offloading is meant to free."""


@dataclass(slots=True, kw_only=True)
class ActivationCounters:
    """Counts since the beginning."""

    offload_bytes: int = 0
    """Of saved activations that were moved away."""
    kept_bytes: int = 0
    """Of those that stayed for lack of room."""
    hits: int = 0
    """Times that one was there when backward asked for it."""
    misses: int = 0
    away_bytes: int = 0
    """Of those that are away now."""
    peak_bytes: int = 0
    """Most bytes away at one time."""
    wait_s: float = 0.0
    """For which the model waited for room or for bytes."""


@dataclass(slots=True, frozen=True, eq=False)
class _Transfer:
    """What a step has begun."""

    done: Callable[[], bool]
    wait: Callable[[], None]
    """Waits until the memory at both ends is free of it; raises what it gave, each time."""


@dataclass(slots=True, eq=False)
class _Piece:
    start: int
    num_bytes: int
    slot: Slot[memoryview] | None = None
    """Its bytes; only on their way where there are spill files."""
    place: Place | None = None
    is_away: bool = False
    copy: Copy | None = None
    """Into the record's target, once it has begun."""


@dataclass(slots=True, eq=False)
class _Record:
    """One storage that was put away; it outlives its `Away` until its moves are over."""

    index: int
    num_bytes: int
    pieces: list[_Piece]
    source: torch.Tensor | None
    """The original, until the copy is where it belongs."""
    target: torch.Tensor | None = None
    """What is being filled, until it is asked for."""
    returning: "list[_Move]" = field(default_factory=list)
    """Into `target`."""
    back: "weakref.ref[torch.UntypedStorage] | None" = None
    """What was given back last, as long as someone uses it."""


class Away:
    """The right to have a storage back; its room is given back when this is dropped."""

    __slots__ = ("__weakref__", "_dropped", "record")

    def __init__(self, record: _Record, dropped: deque[_Record]) -> None:
        self.record = record
        self._dropped = dropped  # last: who has it has both

    def __del__(self) -> None:
        # No more than this: it may run anywhere, also after an interrupt in `__init__`.
        if hasattr(self, "_dropped"):
            self._dropped.append(self.record)


Steps = Generator[_Transfer]
"""Of one piece; each begins a transfer."""


class _Move:
    """The steps of one piece; each begins a transfer, and the next one follows it.

    An interrupt of the wait for a transfer leaves that under way.
    """

    def __init__(self, record: _Record, piece: _Piece, steps: Steps) -> None:
        """Stores its arguments; `step` begins."""
        self.record = record
        self.piece = piece
        self.error: Exception | None = None
        self.is_over = False
        self._steps = steps
        self._pending: _Transfer | None = None

    def step(self) -> None:
        """Waits for the transfer under way and begins what follows."""
        if self.is_over:
            return
        try:
            failure = self._wait()
            if failure is None:
                self._pending = next(self._steps, None)
            else:
                self._pending = self._steps.throw(failure)
        except StopIteration:
            self._pending = None
        except Exception as error:  # noqa: BLE001 - whoever asks for the bytes gets it
            self.error, self._pending = error, None
        except BaseException:  # an interrupt: of the steps nothing is left
            self.error = StoreError(
                "cannot bring a saved activation back: expected its transfer, found that an "
                "interrupt ended it; run the forward again"
            )
            raise
        self.is_over = self._pending is None

    def _wait(self) -> Exception | None:
        """Waits for the transfer under way, and returns what it raised."""
        try:
            if self._pending is not None:
                self._pending.wait()
        except Exception as error:  # noqa: BLE001 - the steps get it
            return error
        return None

    def advance(self) -> None:
        """Goes on as far as it can without waiting."""
        while self._pending is not None and self._pending.done():
            self.step()

    def finish(self) -> None:
        """Goes on to the end."""
        while not self.is_over:
            self.step()


class _Waits:
    """Says of each wait for activations which part of it was for which path."""

    def __init__(
        self, counters: ActivationCounters, stalls: StallAccount, spill: Spill | None
    ) -> None:
        self._counters = counters
        self._stalls = stalls
        self._spill = spill
        self._by_label: dict[str, float] = {}

    @contextlib.contextmanager
    def within(self, cause: str) -> Iterator[None]:
        """Adds the time within to the account; what is for no path is checksums or copies."""
        self._by_label.clear()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            whole_s = time.perf_counter() - started_s
            rest_s = max(whole_s - sum(self._by_label.values()), 0.0)
            self._add(LINK if self._spill is None else CHECKSUM, rest_s)
            self._counters.wait_s += sum(self._by_label.values())
            for label, duration_s in self._by_label.items():
                self._stalls.add(label, cause, duration_s)
            self._by_label.clear()

    @contextlib.contextmanager
    def of(self, piece: _Piece) -> Iterator[None]:
        """Takes the time within for a wait for the path of a piece."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            duration_s = time.perf_counter() - started_s
            if self._spill is not None and piece.place is not None:
                self._add(self._spill.label_of(piece.place), duration_s)

    def _add(self, label: str, duration_s: float) -> None:
        self._by_label[label] = self._by_label.get(label, 0.0) + duration_s


class ActivationStore:
    """Keeps the bytes of saved storages in host slots, or through these in spill files.

    Concurrency: Any thread; one at a time gets in.
    """

    def __init__(
        self,
        *,
        slots: SlotPool[memoryview],
        device: Device,
        spill: Spill | None,
        stalls: StallAccount,
    ) -> None:
        """Stores its arguments.

        Args:
            slots: Where the bytes stay, or through which they go to `spill`.
            device: Whose memory they leave.
            spill: Open, with places of one slot; None: they stay in the slots.
            stalls: Where each wait is added.
        """
        self.counters = ActivationCounters()
        self._waits = _Waits(self.counters, stalls, spill)
        self._slots = slots
        self._device = device
        self._spill = spill
        self._lock = threading.RLock()
        self._moves: deque[_Move] = deque()
        self._live: dict[int, _Record] = {}  # in the order in which they were put
        self._dropped: deque[_Record] = deque()
        self._num_put = 0
        self._largest_bytes = 0
        self._is_closed = False
        self._has_failed = False

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    def put(self, storage: torch.UntypedStorage) -> Away | None:
        """Begins to move a storage away; None if there is no room for it, and it stays."""
        with self._lock:
            self._settle()
            num_bytes = storage.nbytes()
            pieces = self._cut(num_bytes)
            if self._is_closed or self._has_failed or not self._has_room(pieces):
                self.counters.kept_bytes += num_bytes
                return None
            with self._waits.within("moving activations away"):
                self._largest_bytes = max(self._largest_bytes, num_bytes)
                self._make_way(num_bytes)
                record = _Record(self._num_put, num_bytes, pieces, _bytes_of(storage))
                away = Away(record, self._dropped)  # first: after an interrupt it is dropped
                self._num_put += 1
                self._count(num_bytes)
                self._live[record.index] = record
                for piece in pieces:
                    piece.slot = self._lease()
                    self._begin(_Move(record, piece, self._leave(record, piece)))
            return away

    def get(self, away: Away) -> torch.UntypedStorage:
        """Returns a storage with the bytes again, and begins to fetch those that come next.

        Raises:
            StorageError, CorruptStateError: They could not be read.
        """
        with self._lock:
            self._settle()
            record = away.record
            found = _present(record)
            if found is None:
                found = self._bring_back(record)
            else:
                self.counters.hits += 1
            self._prefetch(before=record.index)
            return found

    def close(self) -> None:
        """Waits for what is under way; what is away is gone. May be called again."""
        with self._lock:
            self._is_closed = True
            while self._moves:
                self._finish_oldest()
            if self._spill is not None:
                self._spill.close()

    def _count(self, num_bytes: int) -> None:
        counters = self.counters
        counters.offload_bytes += num_bytes
        counters.away_bytes += num_bytes
        counters.peak_bytes = max(counters.peak_bytes, counters.away_bytes)

    def _cut(self, num_bytes: int) -> list[_Piece]:
        size = self._slots.slot_bytes
        return [_Piece(start, min(size, num_bytes - start)) for start in range(0, num_bytes, size)]

    # Out.

    def _leave(self, record: _Record, piece: _Piece) -> Steps:
        slot, source = piece.slot, record.source
        assert slot is not None and source is not None
        host = torch.frombuffer(slot.memory, dtype=torch.uint8)[: piece.num_bytes]
        copy = self._device.copy_out(source[piece.start : piece.start + piece.num_bytes], host)
        del source
        yield _Transfer(copy.done, copy.synchronize)
        if self._spill is None:
            piece.is_away = True
            return
        piece.slot = None
        with self._slots.releasing(slot):
            try:
                piece.place, ticket = self._spill.write(slot.memory, num_bytes=piece.num_bytes)
                yield _Transfer(ticket.done, ticket.wait)
                piece.is_away = True
            except StorageError as error:
                self._give_up(error)

    def _give_up(self, error: StorageError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning(
                "activations stay in memory from now on, as they can't be written to storage: %s",
                error,
            )

    def _has_room(self, pieces: list[_Piece]) -> bool:
        # Slots through which bytes go to storage come free in time.
        return self._spill is not None or len(pieces) <= self._slots.num_free

    def _make_way(self, num_bytes: int) -> None:
        """Waits until little enough is on its way out."""
        most = STORAGES_UNDER_WAY * self._largest_bytes
        while self._moves and self._leaving_bytes() + num_bytes > most:
            self._finish_oldest()

    def _leaving_bytes(self) -> int:
        leaving = {move.record for move in self._moves if move.record.source is not None}
        return sum(record.num_bytes for record in leaving)

    # Back.

    def _bring_back(self, record: _Record) -> torch.UntypedStorage:
        if self._is_closed:
            raise StoreError(
                "cannot bring a saved activation back: expected an open session, found it closed; "
                "call `backward()` before the session ends"
            )
        is_hit = record.target is not None and all(move.is_over for move in record.returning)
        self.counters.hits += is_hit
        self.counters.misses += not is_hit
        with self._waits.within("bringing activations back"):
            if record.target is None:
                self._begin_return(record, is_needed=True)
            target, moves = record.target, record.returning
            assert target is not None
            record.target, record.returning = None, []
            for move in moves:
                with self._waits.of(move.piece):
                    while not move.is_over and move.piece.copy is None:
                        move.step()
                if move.error is not None:
                    raise move.error
            for piece in record.pieces:
                assert piece.copy is not None
                piece.copy.wait()
                piece.copy = None
        storage = target.untyped_storage()
        record.back = weakref.ref(storage)
        return storage

    def _begin_return(self, record: _Record, *, is_needed: bool) -> None:
        while any(move.record is record for move in self._moves):  # of one that was interrupted
            self._finish_oldest()
        target = self._device.empty(record.num_bytes)
        moves: list[_Move] = []
        for piece in record.pieces:
            piece.copy = None
            slot = self._lease() if self._spill is not None else piece.slot
            assert slot is not None
            steps = self._return(piece, slot, target, is_needed=is_needed)
            moves.append(_Move(record, piece, steps))
            self._begin(moves[-1])
        record.returning = moves
        record.target = target

    def _return(
        self, piece: _Piece, slot: Slot[memoryview], target: torch.Tensor, *, is_needed: bool
    ) -> Steps:
        if self._spill is None:
            yield from self._copy_back(piece, slot, target)
            return
        with self._slots.releasing(slot):
            assert piece.place is not None
            ticket = self._spill.read(piece.place, slot.memory, is_needed=is_needed)
            yield _Transfer(ticket.done, ticket.wait)
            self._spill.check(piece.place, slot.memory)
            yield from self._copy_back(piece, slot, target)

    def _copy_back(self, piece: _Piece, slot: Slot[memoryview], target: torch.Tensor) -> Steps:
        part = target[piece.start : piece.start + piece.num_bytes]
        copy = piece.copy = self._device.copy_in(slot.memory[: piece.num_bytes], part)
        yield _Transfer(copy.done, copy.synchronize)

    def _prefetch(self, *, before: int) -> None:
        """Begins to fetch what was put before: backward goes the other way."""
        most = STORAGES_UNDER_WAY * self._largest_bytes
        returning_bytes = sum(r.num_bytes for r in self._live.values() if r.target is not None)
        for record in reversed(self._live.values()):
            if record.index >= before or record.target is not None or _present(record) is not None:
                continue
            if returning_bytes + record.num_bytes > most:
                return
            if self._spill is not None and len(record.pieces) > self._slots.num_free:
                return
            self._begin_return(record, is_needed=False)
            returning_bytes += record.num_bytes

    # Both.

    def _begin(self, move: _Move) -> None:
        self._moves.append(move)  # first: what is under way is known, also after an interrupt
        move.step()

    def _lease(self) -> Slot[memoryview]:
        slot = self._slots.try_lease()
        while slot is None and self._moves:
            self._finish_oldest()
            slot = self._slots.try_lease()
        if slot is None and self._spill is not None:
            self._spill.wait_idle()  # after an interrupt one may be of no move
            slot = self._slots.try_lease()
        if slot is None:
            raise BudgetError(
                f"cannot move an activation: expected one of {self._slots.num_slots} slots, found "
                "that all are reached by what an interrupt ended; drop its exception, or raise "
                "`activations.memory`"
            )
        return slot

    def _finish_oldest(self) -> None:
        move = self._moves[0]  # an interrupt of the wait leaves it there
        with self._waits.of(move.piece):
            move.finish()
        self._on_over(move)
        self._moves.popleft()

    def _settle(self) -> None:
        """Goes on with what is under way, without waiting, and frees what was dropped."""
        for move in self._moves:
            move.advance()
        over = [move for move in self._moves if move.is_over]
        for move in over:
            self._on_over(move)
        if over:
            self._moves = deque(move for move in self._moves if not move.is_over)
        for _ in range(len(self._dropped)):
            record = self._dropped[0]
            if any(move.record is record for move in self._moves):
                self._dropped.rotate(-1)
            else:
                self._free(record)
                self._dropped.popleft()

    def _on_over(self, move: _Move) -> None:
        record = move.record
        if record.source is not None and all(piece.is_away for piece in record.pieces):
            record.source = None

    def _free(self, record: _Record) -> None:
        """Gives up what a record has; may be called again where an interrupt ended it."""
        if self._live.pop(record.index, None) is not None:
            self.counters.away_bytes -= record.num_bytes
        record.source = record.target = None
        record.returning = []
        for piece in record.pieces:
            if piece.slot is not None:
                self._slots.release(piece.slot)
            place, piece.place = piece.place, None
            if place is not None and self._spill is not None:
                self._spill.release(place)


def _present(record: _Record) -> torch.UntypedStorage | None:
    """Returns a storage of the device that has the bytes now, if there is one."""
    if record.source is not None:
        return record.source.untyped_storage()
    return record.back() if record.back is not None else None


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a uint8 tensor over all of a storage."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
