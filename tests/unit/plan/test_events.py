import pytest

from offload.plan.events import EventClock, Server, Ticket, all_of
from offload.plan.machine import PathRates
from offload.plan.simulated_path import Direction, SimulatedPath, Urgency


def path(clock, *, read=100.0, write=50.0, mixed=30.0):
    rates = PathRates(
        path="a", read_bytes_per_s=read, write_bytes_per_s=write, mixed_bytes_per_s=mixed
    )
    return SimulatedPath(clock, rates)


def times_of(clock, tickets):
    """When each ticket is done, by name."""
    found = {}
    for name, ticket in tickets.items():
        ticket.on_done(lambda name=name: found.setdefault(name, clock.now_s))
    clock.run_until(all_of(list(tickets.values())))
    return found


def test_a_process_goes_on_when_all_that_it_waits_for_is_done():
    clock = EventClock()
    server, seen = Server(clock), []

    def process():
        yield [server.serve(2.0), server.serve(3.0)]
        seen.append(clock.now_s)
        yield []
        seen.append(clock.now_s)

    clock.run_until(clock.spawn(process()))

    assert seen == [5.0, 5.0]  # one after the other; nothing to wait for takes no time


def test_a_simulation_that_waits_for_nothing_says_so():
    with pytest.raises(RuntimeError, match="stands still"):
        EventClock().run_until(Ticket())


def test_a_path_moves_one_direction_at_its_own_rate_and_both_at_the_mixed_one():
    clock = EventClock()
    one = path(clock)

    done = times_of(
        clock,
        {
            "read": one.submit(Direction.READ, 160, Urgency.NEEDED),
            "write": one.submit(Direction.WRITE, 60, Urgency.WRITE_BACK),
        },
    )

    # 60 bytes each way at 30/s, then 100 bytes of reads at 100/s.
    assert done == pytest.approx({"write": 2.0, "read": 3.0})
    assert one.round_trip_bytes_per_s == pytest.approx(30)  # not (220 / 3) / 2


def test_what_is_needed_now_overtakes_what_waits_but_not_what_moves():
    clock = EventClock()
    one = path(clock)

    done = times_of(
        clock,
        {
            "moving": one.submit(Direction.READ, 100, Urgency.PREFETCH),
            "ahead": one.submit(Direction.READ, 100, Urgency.PREFETCH),
            "needed": one.submit(Direction.READ, 100, Urgency.NEEDED),
            "nothing": one.submit(Direction.READ, 0, Urgency.NEEDED),
        },
    )

    assert done == pytest.approx({"nothing": 0.0, "moving": 1.0, "needed": 2.0, "ahead": 3.0})
