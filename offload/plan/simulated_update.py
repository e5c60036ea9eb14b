"""The update phase in simulated time: the window, the cache and the order of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offload.plan.events import EventClock, Process, Server, Ticket, all_of, any_of
from offload.plan.host import HostPlan
from offload.plan.reading_order import ReadingOrder
from offload.plan.simulated_store import SimulatedStore
from offload.plan.window import is_left_for_reads
from offload.plan.work import Piece, RecordWork, StepWork
from offload.policy import Order


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
        order: Order,
        kernels: Server,
        kernel_s: Callable[[RecordWork, int], float],
    ) -> None:
        """Stores its arguments.

        Args:
            clock: Of the simulation.
            store: Where state and parameters lie.
            work: What is updated.
            window: Room for records.
            order: The policy.
            kernels: Runs the fused pass.
            kernel_s: Time of the pass over a record of which so many bytes are moved.
        """
        self._clock = clock
        self._store = store
        self._records = work.records
        self._window = window
        self._order = order
        self._kernels = kernels
        self._kernel_s = kernel_s
        self._cached: set[int] = set()
        self._free_states = window.num_buffers + window.num_cached
        self._num_places = window.num_places or window.num_buffers + window.num_cached
        self._free_places = self._num_places
        self._num_reading = 0
        self._num_writing = 0
        self.io_wait_s = 0.0

    def place(self) -> None:
        """Says where everything lies before the first step."""
        for index, record in enumerate(self._records):
            if record.state_bytes:
                self._store.place(_state_key(index), record.state_bytes)
            for piece in record.pieces:
                if piece.num_bytes:
                    self._store.place(piece_key(index, piece), piece.num_bytes)

    def run(
        self,
        step: int,
        *,
        ready: Callable[[int], Ticket],
        on_updated: Callable[[int], None],
        sequence: Sequence[int] | None = None,
    ) -> Process:
        """Updates every record once.

        Args:
            step: From 1; what the order depends on.
            ready: Gives what the pass over a record waits for, beside its bytes.
            on_updated: Called with a record when its pass is over.
            sequence: Instead of the order's, where a pass of the model sets it.
        """
        count = len(self._records)
        kept = self._order.kept(count, self._window.num_cached, step)
        is_free = sequence is None and self._window.max_in_flight is None
        waiting = ReadingOrder(self._order.sequence(count, step) if sequence is None else sequence)
        reading: list[_InFlight] = []
        writing: list[_InFlight] = []
        while waiting or reading or writing:
            writing = [current for current in writing if not current.moved.is_done]
            self._read_ahead(waiting, reading, ready, is_free=is_free)
            current = self._next(reading, ready)
            if current is not None:
                yield self._kernels.serve(self._pass_s(current))
                reading.remove(current)
                on_updated(current.index)
                while self._is_full(self._num_writing):
                    yield any_of([each.moved for each in writing])
                    writing = [each for each in writing if not each.moved.is_done]
                self._start_write(current, is_kept=current.index in kept)
                writing.append(current)
            elif reading or writing:
                asked_s = self._clock.now_s
                is_waiting_for_bytes = any(not each.moved.is_done for each in reading)
                yield any_of(
                    [each.moved for each in (*reading, *writing) if not each.moved.is_done]
                    + [gate for each in reading if not (gate := ready(each.index)).is_done]
                )
                if is_waiting_for_bytes or not reading:
                    self.io_wait_s += self._clock.now_s - asked_s
            elif waiting:
                raise ValueError("expected a window of at least one buffer, found none")

    def _next(
        self, reading: Sequence[_InFlight], ready: Callable[[int], Ticket]
    ) -> _InFlight | None:
        """Returns the first record whose pass can run; a baseline takes them in order."""
        candidates = reading if self._window.max_in_flight is None else reading[:1]
        for current in candidates:
            if current.moved.is_done and ready(current.index).is_done:
                return current
        return None

    def _is_full(self, num_records: int) -> bool:
        most = self._window.max_in_flight
        return most is not None and num_records >= most

    def _pass_s(self, current: _InFlight) -> float:
        record = self._records[current.index]
        moved = 0 if current.is_hit else 2 * record.state_bytes
        moved += sum(
            piece.num_bytes * (1 + piece.is_read + piece.is_handed_over) for piece in record.pieces
        )
        return self._kernel_s(record, moved + record.spilled_bytes)

    def _read_ahead(
        self,
        waiting: ReadingOrder[int],
        reading: list[_InFlight],
        ready: Callable[[int], Ticket],
        *,
        is_free: bool,
    ) -> None:
        """Starts reading the next records while there is room for them.

        Args:
            is_free: Whether one that is in memory may wait: no pass or baseline sets the order.
        """
        while not self._is_full(self._num_reading):
            index = self._next_read(waiting) if is_free else waiting.peek()
            if index is None:
                return
            current = self._try_lease(index)
            if current is None:
                return
            if reading and not current.holds_place:
                return  # all is resident: there is nothing to read ahead
            waiting.take(index)
            reading.append(current)
            self._num_reading += 1
            current.moved = all_of(self._reads(current, ready))
            current.moved.on_done(self._on_read)

    def _next_read(self, waiting: ReadingOrder[int]) -> int | None:
        """Returns what is read next: what is in memory must not keep reads waiting."""
        if is_left_for_reads(self._free_places, self._num_places):
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

    def _reads(self, current: _InFlight, ready: Callable[[int], Ticket]) -> list[Ticket]:
        index, record, store = current.index, self._records[current.index], self._store
        tickets: list[Ticket] = []
        if record.state_bytes and not current.is_hit:
            tickets += store.read(_state_key(index))
        for piece in record.pieces:
            if piece.is_read and piece.num_bytes:
                tickets += store.read(piece_key(index, piece))
        if record.spilled_bytes:
            tickets.append(self._clock.spawn(self._read_gradients(index, ready(index))))
        return tickets

    def _read_gradients(self, index: int, complete: Ticket) -> Process:
        yield complete  # until then they are not all there
        yield self._store.read(spill_key(index))

    def _start_write(self, current: _InFlight, *, is_kept: bool) -> None:
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
        self._num_writing += 1
        current.moved = all_of(tickets)
        current.moved.on_done(lambda: self._on_written(current))

    def _on_read(self) -> None:
        self._num_reading -= 1

    def _on_written(self, current: _InFlight) -> None:
        self._num_writing -= 1
        self._free_states += current.holds_state
        self._free_places += current.holds_place


def piece_key(index: int, piece: Piece) -> str:
    """Returns the name under which the parameters of a unit in a record are stored."""
    return f"parameter/{index}/{piece.unit}"


def spill_key(index: int) -> str:
    """Returns the name under which the spilled gradients of a record are stored."""
    return f"gradient/{index}"


def _state_key(index: int) -> str:
    return f"state/{index}"
