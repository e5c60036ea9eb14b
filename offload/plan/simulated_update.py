"""The update phase in simulated time: the window, the cache and the order of the engine."""

from collections.abc import Callable, Container, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from offload.plan.events import EventClock, Process, Server, Ticket, all_of, any_of
from offload.plan.host import HostPlan
from offload.plan.reading_order import ChosenOrder, ReadingOrder
from offload.plan.simulated_path import Urgency
from offload.plan.simulated_pending import PendingUpdate
from offload.plan.simulated_store import SimulatedStore
from offload.plan.window import is_left_for_reads
from offload.plan.work import Piece, RecordWork, StepWork

_URGENCY = Urgency.WRITE_BACK
"""Of reads too: fetches of units come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """Places for records in host memory."""

    num_buffers: int
    """Records whose state was not in memory."""
    num_places: int | None = None
    """Records in the window at one time; None: as many as there are buffers and cached ones."""
    num_cached: int = 0
    """Records whose state stays from one step to the next."""
    max_in_flight: int | None = None
    """Records read, and written, at one time; None: as many as there are buffers."""


def window_of(host: HostPlan) -> WindowSize:
    """Returns the window that is planned for a model."""
    return WindowSize(
        num_buffers=max(host.num_buffers, 1),
        num_places=max(host.num_places, 1),
        num_cached=host.num_cached,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    index: int
    is_hit: bool
    """Its state was in memory."""
    holds_state: bool
    holds_place: bool
    moved: Ticket = field(default_factory=Ticket)
    """Done when its bytes are there, and anew when they are written."""


_Waiting = ReadingOrder[int] | ChosenOrder


class SimulatedUpdate:
    """Updates records in a policy's order: reading, computing and writing at the same time.

    What is cached lasts from step to step.
    """

    def __init__(
        self,
        clock: EventClock,
        store: SimulatedStore,
        work: StepWork,
        *,
        window: WindowSize,
        kernels: Server,
        kernel_s: Callable[[RecordWork, int], float],
    ) -> None:
        """Stores its arguments.

        Args:
            clock: Of the simulation.
            store: Where state and parameters lie.
            work: What is updated.
            window: Room for records.
            kernels: Runs the fused pass.
            kernel_s: Time of the pass over a record of which so many bytes are moved.
        """
        self._clock = clock
        self._store = store
        self._records = work.records
        self._window = window
        self._kernels = kernels
        self._kernel_s = kernel_s
        self._cached: set[int] = set()
        self._free_states = window.num_buffers + window.num_cached
        self._num_places = window.num_places or window.num_buffers + window.num_cached
        self._free_places = self._num_places
        self._ahead: list[_InFlight] = []
        self._io_wait_s = 0.0
        self._waiting_since_s: float | None = None

    @property
    def io_wait_s(self) -> float:
        """Time in which there was nothing to do but wait for storage, up to now."""
        since_s = self._waiting_since_s
        return self._io_wait_s + (0.0 if since_s is None else self._clock.now_s - since_s)

    @property
    def cached(self) -> AbstractSet[int]:
        """Records whose state is in memory."""
        return self._cached

    @property
    def num_places_free(self) -> int:
        """Places in the window that are free."""
        return self._free_places

    @property
    def num_free(self) -> int:
        """Records for which there is room, those that are cached left aside."""
        return min(self._free_places, self._free_states)

    def place(self) -> None:
        """Says where everything lies before the first step."""
        for index, record in enumerate(self._records):
            if record.state_bytes:
                self._store.place(_state_key(index), record.state_bytes)
            for piece in record.pieces:
                if piece.num_bytes:
                    self._store.place(piece_key(index, piece), piece.num_bytes)

    def prefetch(self, indices: Iterable[int]) -> None:
        """Starts reading the state of records whose update is not asked for yet, as room allows."""
        for index in indices:
            current = self._try_lease(index) if self._records[index].state_bytes else None
            if current is not None:
                current.moved = all_of(self._read_state(current))
                self._ahead.append(current)

    def run(
        self,
        sequence: Sequence[int],
        *,
        pending: PendingUpdate,
        kept: Container[int],
        may_read: Callable[[int], Ticket] | None = None,
        is_free: bool = False,
        is_chosen: bool = False,
    ) -> Process:
        """Updates records, each once.

        Args:
            sequence: In the order in which they are read.
            pending: Is told of each, and says when its pass may begin.
            kept: Those whose state stays in memory.
            may_read: Gives what the reads of a record wait for; None: nothing.
            is_free: Whether a record that is in memory may wait for others.
            is_chosen: Whether an overlap chooses among those that wait.
        """
        waiting: _Waiting = ReadingOrder(sequence)
        if is_chosen:
            waiting = ChosenOrder(sequence, pending.choose)
        reading = self._take_over(waiting, pending)
        writing: list[_InFlight] = []
        is_free = is_free and self._window.max_in_flight is None
        while waiting or reading or writing:
            writing = _unfinished(writing)
            self._read_ahead(waiting, reading, pending, may_read, is_free=is_free)
            current = self._next(reading, pending)
            if current is not None:
                yield self._kernels.serve(self._pass_s(current))
                reading.remove(current)
                pending.on_computed(current.index)
                while self._is_full(writing):
                    yield any_of([each.moved for each in _unfinished(writing)])
                self._start_write(current, pending=pending, is_kept=current.index in kept)
                writing.append(current)
            elif waiting or reading or writing:
                yield from self._wait(waiting, reading, writing, pending, may_read)

    def _take_over(self, waiting: _Waiting, pending: PendingUpdate) -> list[_InFlight]:
        """Goes on with what was read ahead."""
        reading, self._ahead = self._ahead, []
        for current in reading:
            waiting.take(current.index)
            pending.on_taken(current.index)
            current.moved = all_of([current.moved, *self._reads_beside_state(current)])
        return reading

    def _wait(
        self,
        waiting: _Waiting,
        reading: Sequence[_InFlight],
        writing: Sequence[_InFlight],
        pending: PendingUpdate,
        may_read: Callable[[int], Ticket] | None,
    ) -> Process:
        """Waits until there may be something to do."""
        moving = [each.moved for each in (*_unfinished(reading), *_unfinished(writing))]
        next_index = waiting.peek()
        gates = [pending.may_begin(each.index) for each in reading]
        gates += [may_read(next_index)] if may_read and next_index is not None else []
        tickets = moving + [gate for gate in gates if not gate.is_done]
        if not tickets:
            raise ValueError("expected a window of at least one buffer, found none")
        if _unfinished(reading) or (moving and not reading):
            self._waiting_since_s = self._clock.now_s
        yield any_of(tickets)
        self._io_wait_s, self._waiting_since_s = self.io_wait_s, None

    def _next(self, reading: Sequence[_InFlight], pending: PendingUpdate) -> _InFlight | None:
        """Returns the record whose pass runs next; a baseline takes them in order."""
        candidates = reading if self._window.max_in_flight is None else reading[:1]
        ready = {
            current.index: current
            for current in candidates
            if current.moved.is_done and pending.may_begin(current.index).is_done
        }
        return ready[pending.choose(list(ready))] if ready else None

    def _is_full(self, in_flight: Sequence[_InFlight]) -> bool:
        most = self._window.max_in_flight
        return most is not None and len(_unfinished(in_flight)) >= most

    def _pass_s(self, current: _InFlight) -> float:
        record = self._records[current.index]
        moved = 0 if current.is_hit else 2 * record.state_bytes
        moved += sum(
            piece.num_bytes * (1 + piece.is_read + piece.is_handed_over) for piece in record.pieces
        )
        return self._kernel_s(record, moved + record.spilled_bytes)

    def _read_ahead(
        self,
        waiting: _Waiting,
        reading: list[_InFlight],
        pending: PendingUpdate,
        may_read: Callable[[int], Ticket] | None,
        *,
        is_free: bool,
    ) -> None:
        """Starts reading the next records while there is room for them."""
        while not self._is_full(reading):
            index = self._next_read(waiting) if is_free else waiting.peek()
            if index is None or (may_read is not None and not may_read(index).is_done):
                return
            current = self._try_lease(index)
            if current is None:
                return
            if reading and not current.holds_place:
                return  # all is resident: there is nothing to read ahead
            waiting.take(index)
            pending.on_taken(index)
            reading.append(current)
            reads = [] if current.is_hit else self._read_state(current)
            current.moved = all_of([*reads, *self._reads_beside_state(current)])

    def _next_read(self, waiting: _Waiting) -> int | None:
        """Returns what is read next: what is in memory must not keep reads waiting."""
        if is_left_for_reads(self._free_places, self._num_places, self._free_states):
            return waiting.peek(besides=self._cached)
        return waiting.peek()

    def _try_lease(self, index: int) -> _InFlight | None:
        record = self._records[index]
        is_hit = index in self._cached
        takes_state = bool(record.state_bytes) and not is_hit
        is_stored = bool(record.state_bytes) or record.has_parameters
        if is_stored and not self._free_places:
            return None
        if takes_state and not self._free_states:
            return None
        self._free_places -= is_stored
        self._free_states -= takes_state
        self._cached.discard(index)
        return _InFlight(
            index=index,
            is_hit=is_hit,
            holds_state=takes_state or is_hit,
            holds_place=is_stored,
        )

    def _read_state(self, current: _InFlight) -> list[Ticket]:
        is_stored = bool(self._records[current.index].state_bytes)
        return self._store.read(_state_key(current.index), _URGENCY) if is_stored else []

    def _reads_beside_state(self, current: _InFlight) -> list[Ticket]:
        index, record = current.index, self._records[current.index]
        keys = [piece_key(index, p) for p in record.pieces if p.is_read and p.num_bytes]
        keys += [spill_key(index)] if record.spilled_bytes else []
        return [ticket for key in keys for ticket in self._store.read(key, _URGENCY)]

    def _start_write(self, current: _InFlight, *, pending: PendingUpdate, is_kept: bool) -> None:
        record, index = self._records[current.index], current.index
        tickets: list[Ticket] = []
        if is_kept and current.holds_state:
            self._cached.add(index)
            current.holds_state = False
        elif record.state_bytes:
            tickets += self._store.write(_state_key(index), record.state_bytes)
        for piece in record.pieces:
            if piece.num_bytes:
                tickets += self._store.write(piece_key(index, piece), piece.num_bytes)
        current.moved = all_of(tickets)
        current.moved.on_done(lambda: self._release(current))
        current.moved.on_done(lambda: pending.on_written(index))

    def _release(self, current: _InFlight) -> None:
        self._free_states += current.holds_state
        self._free_places += current.holds_place


def _unfinished(in_flight: Sequence[_InFlight]) -> list[_InFlight]:
    """Returns those whose transfers are not done."""
    return [current for current in in_flight if not current.moved.is_done]


def piece_key(index: int, piece: Piece) -> str:
    """Returns the name under which the parameters of a unit in a record are stored."""
    return f"parameter/{index}/{piece.unit}"


def spill_key(index: int) -> str:
    """Returns the name under which the spilled gradients of a record are stored."""
    return f"gradient/{index}"


def _state_key(index: int) -> str:
    return f"state/{index}"
