"""One storage path in simulated time."""

import heapq
import itertools
from enum import IntEnum

from offload.plan.events import EventClock, Ticket
from offload.plan.machine import PathRates


class Direction(IntEnum):
    READ = 0
    WRITE = 1


class Urgency(IntEnum):
    """Which of the waiting transfers of one direction is next; the lower value."""

    NEEDED = 0
    PREFETCH = 1
    WRITE_BACK = 2


_DONE_BYTES = 1e-3
"""Less than this is rounding of the clock, not a byte."""
_ENOUGH_OF_BOTH = 1 / 8
"""Of the busy time."""


class _Moved:
    """Bytes, and the time that they took."""

    __slots__ = ("num_bytes", "seconds")

    def __init__(self) -> None:
        self.num_bytes = 0.0
        self.seconds = 0.0

    def add(self, num_bytes: float, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds


class _Transfer:
    __slots__ = ("left", "ticket")

    def __init__(self, num_bytes: int, ticket: Ticket) -> None:
        self.left = float(num_bytes)
        self.ticket = ticket


class SimulatedPath:
    """A path with the rates of the bound: R or W alone, b each way while both are under way.

    One transfer of each direction moves at a time, at the path's whole rate: queues hide latency,
    and what they share among them does not change when the last of them ends.
    """

    def __init__(self, clock: EventClock, rates: PathRates) -> None:
        self.rates = rates
        self._clock = clock
        self._waiting: dict[Direction, list[tuple[int, int, _Transfer]]] = {
            Direction.READ: [],
            Direction.WRITE: [],
        }
        self._moving: dict[Direction, _Transfer] = {}
        self._count = itertools.count()
        self._seen_s = 0.0
        self._plan_number = 0
        self.moved_bytes = {Direction.READ: 0, Direction.WRITE: 0}
        self.queued_bytes = {Direction.READ: 0.0, Direction.WRITE: 0.0}
        self._busy = _Moved()
        self._both = _Moved()

    def submit(self, direction: Direction, num_bytes: int, urgency: Urgency) -> Ticket:
        """Returns the ticket of a transfer that begins when its turn comes."""
        ticket = Ticket()
        if num_bytes == 0:
            ticket.complete()
            return ticket
        self._catch_up()
        transfer = _Transfer(num_bytes, ticket)
        entry = (int(urgency), next(self._count), transfer)
        heapq.heappush(self._waiting[direction], entry)
        self.moved_bytes[direction] += num_bytes
        self.queued_bytes[direction] += num_bytes
        self._go_on()
        return ticket

    @property
    def round_trip_bytes_per_s(self) -> float | None:
        """Bytes that went in and out again each second while both directions were under way.

        While any was, where both seldom were: as the engine measures it.
        """
        is_enough = self._both.seconds > _ENOUGH_OF_BOTH * self._busy.seconds
        moved = self._both if is_enough else self._busy
        return moved.num_bytes / moved.seconds / 2 if moved.seconds > 0 else None

    def _rate(self, direction: Direction) -> float:
        if len(self._moving) == 2:
            return self.rates.mixed_bytes_per_s
        is_read = direction is Direction.READ
        return self.rates.read_bytes_per_s if is_read else self.rates.write_bytes_per_s

    def _catch_up(self) -> None:
        """Takes off what has moved since the last look."""
        elapsed_s = self._clock.now_s - self._seen_s
        self._seen_s = self._clock.now_s
        if not self._moving or elapsed_s <= 0:
            return
        moved = {d: self._rate(d) * elapsed_s for d in self._moving}
        self._busy.add(sum(moved.values()), elapsed_s)
        if len(moved) == 2:
            self._both.add(sum(moved.values()), elapsed_s)
        for direction, num_bytes in moved.items():
            self._moving[direction].left -= num_bytes
            self.queued_bytes[direction] = max(self.queued_bytes[direction] - num_bytes, 0.0)

    def _go_on(self) -> None:
        """Starts what can start, and sets the event at which the next transfer ends."""
        for direction, waiting in self._waiting.items():
            if direction not in self._moving and waiting:
                self._moving[direction] = heapq.heappop(waiting)[2]
        if not self._moving:
            return
        self._plan_number += 1
        number = self._plan_number
        wait_s = min(max(t.left, 0.0) / self._rate(d) for d, t in self._moving.items())
        self._clock.at(self._clock.now_s + wait_s, lambda: self._on_due(number))

    def _on_due(self, number: int) -> None:
        if number != self._plan_number:
            return  # something was submitted since, and another event set
        self._catch_up()
        ended = [d for d, transfer in self._moving.items() if self._is_over(d, transfer)]
        tickets = [self._moving.pop(direction).ticket for direction in ended]
        self._go_on()
        for ticket in tickets:
            ticket.complete()

    def _is_over(self, direction: Direction, transfer: _Transfer) -> bool:
        # Late in a long simulation a step of the clock is worth more than a byte.
        rounding = self._rate(direction) * self._clock.now_s * 1e-14
        return transfer.left <= max(_DONE_BYTES, rounding)
