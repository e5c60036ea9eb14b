"""Forward and backward passes in simulated time: fetches ahead of use, links, compute."""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from offload.plan.events import EventClock, Places, Process, Server, Ticket, Wait, all_of
from offload.plan.machine import LinkRates
from offload.plan.simulated_path import Urgency
from offload.plan.simulated_store import SimulatedStore
from offload.plan.simulated_update import piece_key, spill_key
from offload.plan.work import StepWork, UnitWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a unit in a step."""

    unit: int
    micro_step: int
    is_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A unit on its way."""

    allowed: Ticket
    """Done when the update of its parameters is."""
    done: Ticket


def uses_of(work: StepWork) -> list[Use]:
    """Returns the uses of a step's units in order."""
    units = range(len(work.units))
    return [
        Use(unit=unit, micro_step=micro_step, is_backward=is_backward)
        for micro_step in range(work.micro_steps)
        for is_backward in (False, True)
        for unit in (reversed(units) if is_backward else units)
    ]


class Link:
    """Copies between host and device, each direction by itself."""

    def __init__(self, clock: EventClock, rates: LinkRates | None) -> None:
        self._clock = clock
        self._rates = rates
        self._up = Server(clock)
        self._down = Server(clock)

    def up(self, num_bytes: int) -> Ticket:
        """Starts copying to the device; at once done where there is no link."""
        rate = self._rates.in_bytes_per_s if self._rates else math.inf
        return self._copy(self._up, num_bytes / rate)

    def down(self, num_bytes: int) -> Ticket:
        """Starts copying from the device."""
        rate = self._rates.out_bytes_per_s if self._rates else math.inf
        return self._copy(self._down, num_bytes / rate)

    def _copy(self, server: Server, duration_s: float) -> Ticket:
        if self._rates is None or not duration_s:
            return all_of(())
        copied, latency_s = server.serve(duration_s), self._rates.latency_s
        return self._clock.spawn(self._late(copied, latency_s)) if latency_s else copied

    def _late(self, copied: Ticket, latency_s: float) -> Process:
        yield copied
        late = Ticket()
        self._clock.at(self._clock.now_s + latency_s, late.complete)
        yield late


class SimulatedPasses:
    """Runs the uses of a step's units: fetch, copy to the device, compute, gradients back."""

    def __init__(
        self,
        clock: EventClock,
        store: SimulatedStore,
        work: StepWork,
        *,
        num_slots: int,
        prefetch_distance: int,
        compute: Server,
        link: Link,
        update_io_wait_s: Callable[[], float],
        num_staged: int | None = None,
    ) -> None:
        """Stores its arguments.

        Args:
            clock: Of the simulation.
            store: Where parameters lie.
            work: The units.
            num_slots: Units in memory at one time; at least 1.
            prefetch_distance: How far ahead of its use a unit is fetched.
            compute: Runs the passes.
            link: To the device.
            update_io_wait_s: Gives the time for which updates waited for storage.
            num_staged: Units on their way through host memory at one time; None: any number.
        """
        self._clock = clock
        self._store = store
        self._work = work
        self._num_slots = max(num_slots, 1)
        self._distance = prefetch_distance
        self._compute = compute
        self._link = link
        self._update_io_wait_s = update_io_wait_s
        self._staging = Places(len(uses_of(work)) if num_staged is None else num_staged)
        self._leaving: deque[tuple[Ticket, int]] = deque()
        """Gradients on their way to the host, and their bytes."""
        self._leaving_bytes = 0
        self._most_leaving_bytes = max((u.gradient_link_bytes for u in work.units), default=0)
        self._keys: list[list[str]] = [[] for _ in work.units]
        # Of a forward under which updates run: what comes from them is not read.
        self._read_keys: list[list[str]] = [[] for _ in work.units]
        self._is_handed_over = [False for _ in work.units]
        for index, record in enumerate(work.records):
            for piece in record.pieces:
                if piece.num_bytes:
                    self._keys[piece.unit].append(piece_key(index, piece))
                if piece.is_handed_over:
                    self._is_handed_over[piece.unit] = True
                elif piece.num_bytes:
                    self._read_keys[piece.unit].append(piece_key(index, piece))
        self._last_of: dict[int, list[int]] = {}
        for index, record in enumerate(work.records):
            # Backward goes from the last unit to the first: that one completes a record.
            first_unit = min(piece.unit for piece in record.pieces)
            self._last_of.setdefault(first_unit, []).append(index)
        self.io_wait_s = 0.0
        """For storage and the link, in passes and in updates that they wait for."""
        self.update_wait_s = 0.0
        """For updates that run under the passes."""

    def place(self) -> None:
        """Says where parameters lie that no update writes."""
        for number, unit in enumerate(self._work.units):
            if unit.frozen_bytes:
                key = f"frozen/{number}"
                self._store.place(key, unit.frozen_bytes)
                self._keys[number].append(key)
                self._read_keys[number].append(key)

    def records_completed_by(self, unit: int) -> Sequence[int]:
        """Returns the records whose gradients are complete after the backward of `unit`."""
        return self._last_of.get(unit, ())

    def run(
        self,
        uses: Sequence[Use],
        *,
        first: int,
        fetched: dict[int, Fetch],
        may_fetch: Callable[[Use], Ticket],
        on_need: Callable[[Use], None],
        on_backward: Callable[[Use, Ticket], None],
    ) -> Process:
        """Runs a stretch of a step's uses.

        Args:
            uses: All of the step's.
            first: Where the stretch begins; it ends with the pass that this use belongs to.
            fetched: Fetches under way, by position; those beyond the stretch stay in it.
            may_fetch: Gives what the fetch of a use waits for.
            on_need: Called with a use whose fetch waits for an update.
            on_backward: Called after each unit's backward, with the ticket of its gradients'
                way to the host.
        """
        kind = (uses[first].micro_step, uses[first].is_backward)
        position = first
        while position < len(uses):
            use = uses[position]
            if (use.micro_step, use.is_backward) != kind:
                return
            self._fetch(position, uses, fetched, may_fetch, Urgency.NEEDED)
            self._fetch_ahead(position, uses, fetched, may_fetch)
            fetch = fetched.pop(position)
            if not fetch.allowed.is_done:
                on_need(use)
            yield from self.wait_for_update(fetch.allowed)
            yield from self._wait_for_io(fetch.done)
            unit = self._work.units[use.unit]
            yield self._compute.serve(unit.backward_s if use.is_backward else unit.forward_s)
            if use.is_backward:
                down = yield from self._send_gradients(unit, is_first=use.micro_step == 0)
                on_backward(use, down)
            position += 1

    def wait_for_update(self, ticket: Ticket) -> Process:
        """Waits for updates that run under the passes."""
        asked_s, io_wait_s = self._clock.now_s, self._update_io_wait_s()
        yield ticket
        waited_s = self._clock.now_s - asked_s
        self.update_wait_s += waited_s
        self.io_wait_s += min(self._update_io_wait_s() - io_wait_s, waited_s)

    def settle(self) -> Process:
        """Waits until all gradients are on the host."""
        yield from self._wait_for_io(all_of([down for down, _ in self._leaving]))
        self._leaving.clear()
        self._leaving_bytes = 0

    def _wait_for_io(self, ticket: Ticket) -> Process:
        asked_s = self._clock.now_s
        yield ticket
        self.io_wait_s += self._clock.now_s - asked_s

    def _send_gradients(self, unit: UnitWork, *, is_first: bool) -> Generator[Wait, None, Ticket]:
        """Starts copying a unit's gradients to the host, no more than the largest unit's ahead."""
        num_bytes = unit.gradient_link_bytes if is_first else unit.later_gradient_link_bytes
        if not is_first:  # the sum so far is brought for that
            yield from self._wait_for_io(self._link.up(num_bytes))
        leaving = self._leaving
        while leaving and self._leaving_bytes + num_bytes > self._most_leaving_bytes:
            oldest, left_bytes = leaving.popleft()
            self._leaving_bytes -= left_bytes
            yield from self._wait_for_io(oldest)
        down = self._link.down(num_bytes)
        leaving.append((down, num_bytes))
        self._leaving_bytes += num_bytes
        return down

    def spill(self, index: int) -> list[Ticket]:
        """Starts writing the gradients of a record."""
        num_bytes = self._work.records[index].spilled_bytes
        return self._store.write(spill_key(index), num_bytes) if num_bytes else []

    def read_spilled(self, index: int) -> list[Ticket]:
        """Starts reading the gradients of a record back, to add to them."""
        has_spilled = bool(self._work.records[index].spilled_bytes)
        return self._store.read(spill_key(index)) if has_spilled else []

    def _comes_from_update(self, use: Use) -> bool:
        is_under_update = use.micro_step == 0 and not use.is_backward
        return is_under_update and self._is_handed_over[use.unit]

    def _fetch_ahead(
        self,
        position: int,
        uses: Sequence[Use],
        fetched: dict[int, Fetch],
        may_fetch: Callable[[Use], Ticket],
    ) -> None:
        """Starts fetching what the rest of a micro-step uses, as far as slots allow."""
        for later in range(position + 1, min(position + self._num_slots, len(uses))):
            use = uses[later]
            if use.micro_step != uses[position].micro_step:
                return  # what a pass of the trainer's ends with leaves its slots
            if later > position + self._distance and not self._comes_from_update(use):
                return
            self._fetch(later, uses, fetched, may_fetch, Urgency.PREFETCH)

    def _fetch(
        self,
        position: int,
        uses: Sequence[Use],
        fetched: dict[int, Fetch],
        may_fetch: Callable[[Use], Ticket],
        urgency: Urgency,
    ) -> None:
        if position not in fetched:
            use = uses[position]
            allowed = may_fetch(use)
            done = self._clock.spawn(self._bring(use, allowed, urgency))
            fetched[position] = Fetch(allowed=allowed, done=done)

    def _bring(self, use: Use, allowed: Ticket, urgency: Urgency) -> Process:
        unit = self._work.units[use.unit]
        if unit.is_kept if use.is_backward else unit.is_carried and use.micro_step:
            return
        yield self._staging.take()
        yield allowed
        keys = self._read_keys if self._comes_from_update(use) else self._keys
        yield [t for key in keys[use.unit] for t in self._store.read(key, urgency)]
        yield self._link.up(unit.link_bytes)
        self._staging.give_back()
