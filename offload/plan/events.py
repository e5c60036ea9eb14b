"""Discrete events: a clock that jumps from one event to the next, and processes that wait.

A process is a generator. It yields the tickets that it waits for and goes on when all are done;
between two yields no simulated time passes.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias

Wait: TypeAlias = "Ticket | Iterable[Ticket]"
Process: TypeAlias = Generator[Wait, None, None]


class Ticket:
    """Something that will have happened at some simulated time."""

    __slots__ = ("_on_done", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._on_done: list[Callable[[], None]] = []

    def complete(self) -> None:
        """Says that it has happened; who waits for it goes on."""
        self.is_done = True
        for callback in self._on_done:
            callback()
        self._on_done.clear()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called when this is done, at once if it is."""
        if self.is_done:
            callback()
        else:
            self._on_done.append(callback)


def all_of(tickets: Sequence[Ticket]) -> Ticket:
    """Returns a ticket that is done when all of `tickets` are; at once where there are none."""
    joined = Ticket()
    missing = [ticket for ticket in tickets if not ticket.is_done]
    if missing:
        _Join(len(missing), joined.complete).watch(missing)
    else:
        joined.complete()
    return joined


def any_of(tickets: Sequence[Ticket]) -> Ticket:
    """Returns a ticket that is done when one of `tickets` is."""
    first = Ticket()

    def on_done() -> None:
        if not first.is_done:
            first.complete()

    for ticket in tickets:
        ticket.on_done(on_done)
    return first


class EventClock:
    """Simulated time and what is due; events of one time happen in the order they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Calls `callback` when the clock reaches `time_s`."""
        self._count += 1
        heapq.heappush(self._due, (max(time_s, self.now_s), self._count, callback))

    def spawn(self, process: Process) -> Ticket:
        """Starts a process; the ticket is done when it has ended."""
        ended = Ticket()
        self._resume(process, ended)
        return ended

    def run_until(self, ticket: Ticket) -> None:
        """Runs events until `ticket` is done.

        Raises:
            RuntimeError: Nothing is due any more: some process waits for what never happens.
        """
        while not ticket.is_done:
            if not self._due:
                raise RuntimeError("the simulation stands still: a process waits for nothing")
            self.now_s, _, callback = heapq.heappop(self._due)
            callback()

    def _resume(self, process: Process, ended: Ticket) -> None:
        while True:
            try:
                wait = next(process)
            except StopIteration:
                ended.complete()
                return
            tickets = [wait] if isinstance(wait, Ticket) else list(wait)
            missing = [ticket for ticket in tickets if not ticket.is_done]
            if missing:
                _Join(len(missing), lambda: self._resume(process, ended)).watch(missing)
                return


class _Join:
    """Calls back when the last of several tickets is done."""

    def __init__(self, count: int, callback: Callable[[], None]) -> None:
        self._left = count
        self._callback = callback

    def watch(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.on_done(self._one_done)

    def _one_done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._callback()


class Server:
    """Does one thing after the other, in the order asked: cores, a device, a link."""

    def __init__(self, clock: EventClock) -> None:
        self._clock = clock
        self._free_at_s = 0.0
        self.busy_s = 0.0

    def serve(self, duration_s: float) -> Ticket:
        """Returns the ticket of work that takes `duration_s` once its turn has come."""
        ticket = Ticket()
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + duration_s
        self.busy_s += duration_s
        self._clock.at(self._free_at_s, ticket.complete)
        return ticket


class Places:
    """So many places, given in the order asked."""

    def __init__(self, count: int) -> None:
        self._num_free = count
        self._waiting: deque[Ticket] = deque()

    def take(self) -> Ticket:
        """Returns the ticket of having one."""
        ticket = Ticket()
        self._waiting.append(ticket)
        self._serve()
        return ticket

    def give_back(self) -> None:
        """Leaves one to whoever waits longest."""
        self._num_free += 1
        self._serve()

    def _serve(self) -> None:
        while self._num_free and self._waiting:
            self._num_free -= 1
            self._waiting.popleft().complete()
