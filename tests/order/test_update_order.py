"""Exact lists of what an update reads and writes, by order: the specification of the cache.

Four records `a` to `d`; a cache of one or two. `r`: a state is read, `w`: written, `hit`: found in
memory. Parameters, which are read and written for each record, are left out.
"""

import pytest
from unit.optim.test_pipeline import Harness

from offload.policy import resolve_order


class Steps:
    """Runs updates of all records in the policy's order, as a wrapped model does."""

    def __init__(self, name, *, num_cached, num_buffers=1, num_places=None, units="abcd"):
        self.order = resolve_order(name)
        self.num_cached = num_cached
        self.harness = Harness(
            num_buffers=num_buffers, num_cached=num_cached, num_places=num_places, units=units
        )
        self.step = 0

    def run(self, units="abcd"):
        self.step += 1
        harness, records = self.harness, self.harness.layout.records
        harness.store.events.clear()
        hits = harness.pipeline.cache_hit_bytes
        kept = self.order.kept(len(records), self.num_cached, self.step)
        harness.run(
            units,
            step=self.step,
            order=[records[i] for i in self.order.sequence(len(records), self.step)],
            kept={records[i].name for i in kept},
        )
        hits = (harness.pipeline.cache_hit_bytes - hits) // records[0].padded_bytes
        states = [event for event in harness.store.events if " state/" in event]
        return [f"{event[0]} {event.split('/')[1][0]}" for event in states], hits


def test_sequential_streams_everything():
    steps = Steps("sequential", num_cached=0)
    steps.run()

    events, hits = steps.run()

    assert events == ["r a", "w a", "r b", "w b", "r c", "w c", "r d", "w d"]
    assert hits == 0


def test_alternating_begins_with_what_the_last_step_ended_with():
    steps = Steps("alternating", num_cached=2)

    first, _ = steps.run()
    second, second_hits = steps.run()
    third, third_hits = steps.run()

    # New states are zero and not read; c and d stay.
    assert first == ["w a", "w b"]
    assert second == ["w d", "w c", "r b", "r a"]
    assert third == ["w a", "w b", "r c", "r d"]
    assert second_hits == third_hits == 2


def test_what_is_in_memory_leaves_places_for_records_that_have_to_be_read():
    steps = Steps("alternating", num_cached=4, num_places=3, units="abcdefgh")
    steps.run("abcdefgh")

    events, hits = steps.run("abcdefgh")

    # Of three places one is left for reads: where h to e took all, nothing would be read beside.
    assert events == ["r d", "w h", "r c", "w g", "r b", "w f", "r a", "w e"]
    assert hits == 4
    assert steps.harness.window.num_places_taken == 0


def test_places_that_reads_have_no_buffers_for_are_taken_by_what_is_in_memory():
    # A third of six places is two, and there is one buffer to read into.
    steps = Steps("alternating", num_cached=6, num_places=6, units="abcdefghijkl")
    steps.run("abcdefghijkl")
    window, store, taken = steps.harness.window, steps.harness.store, []
    write = store.write

    def counting(*arguments, **options):
        taken.append(window.num_places_taken)
        return write(*arguments, **options)

    store.write = counting
    events, hits = steps.run("abcdefghijkl")

    assert hits == 6
    assert max(taken) == 6
    assert events.index("r f") < events.index("w k")  # and a read still runs beside writes


def test_resident_records_are_never_moved():
    steps = Steps("resident", num_cached=2)
    steps.run()

    events, hits = steps.run()

    assert events == ["r b", "w b", "r d", "w d"]
    assert hits == 2


@pytest.mark.parametrize("name", ["alternating", "resident"])
def test_a_cache_of_all_records_moves_nothing(name):
    steps = Steps(name, num_cached=4)
    steps.run()

    events, hits = steps.run()

    assert events == []
    assert hits == 4


def test_a_cached_record_that_a_step_leaves_out_is_written_back():
    steps = Steps("alternating", num_cached=2)
    steps.run()

    events, _ = steps.run("abc")  # d has no gradient and is not kept by step 2

    assert events == ["w d", "w c", "r b", "r a"]
    assert set(steps.harness.window.cached) == {"a#0", "b#0"}


def test_what_steps_leave_out_is_written_back_by_no_more_at_once_than_the_window_has_places():
    steps = Steps("alternating", num_cached=6, num_places=2, units="abcdefgh")
    steps.run("abcdefgh")
    store, tickets, in_flight = steps.harness.store, [], []
    write = store.write

    def counting(record, source, **options):
        ticket = write(record, source, **options)
        if record.startswith("state/"):
            tickets.append(ticket)
            in_flight.append(sum(not each.was_awaited for each in tickets))
        return ticket

    store.write = counting
    steps.order = resolve_order("sequential")  # keeps nothing
    events, _ = steps.run("a")

    assert {event[2] for event in events if event[0] == "w"} == set("acdefgh")
    assert max(in_flight) == 2
    assert steps.harness.window.num_places_taken == 0


def test_edits_alone_leave_the_cache_as_it_is():
    steps = Steps("resident", num_cached=2)
    steps.run()
    harness = steps.harness
    harness.state.edited.add("b.p")
    harness.store.events.clear()

    harness.pipeline.run(harness.layout.records, {}, kept=set(harness.window.cached))

    assert [e for e in harness.store.events if "state/" in e] == [
        "read state/b#0",
        "write state/b#0",
    ]
    assert set(harness.window.cached) == {"a#0", "c#0"}


@pytest.mark.parametrize("name", ["sequential", "alternating", "resident"])
@pytest.mark.parametrize("num_cached", [0, 1, 2, 3, 4])
def test_no_order_changes_a_bit(name, num_cached):
    plain, steps = Steps("sequential", num_cached=0), Steps(name, num_cached=num_cached)

    for units in ("abcd", "abcd", "acd", "b", "abcd"):
        plain.run(units)
        steps.run(units)

    for unit in "abcd":
        expected = plain.harness.stored_parameter(unit)
        assert expected.equal(steps.harness.stored_parameter(unit))


@pytest.mark.parametrize("name", ["alternating", "resident"])
@pytest.mark.parametrize("num_buffers, num_places", [(1, 2), (1, 3), (2, 6), (2, 8)])
@pytest.mark.parametrize("num_cached", [2, 5, 8])
def test_no_number_of_places_changes_a_bit(name, num_cached, num_buffers, num_places):
    units = "abcdefgh"
    plain = Steps("sequential", num_cached=0, units=units)
    steps = Steps(
        name, num_cached=num_cached, num_buffers=num_buffers, num_places=num_places, units=units
    )

    for touched in (units, units, "acdgh", "b", units):
        plain.run(touched)
        steps.run(touched)

    assert steps.harness.window.num_places_taken == 0
    for unit in units:
        expected = plain.harness.stored_parameter(unit)
        assert expected.equal(steps.harness.stored_parameter(unit))
