"""Exact lists of what updates do that wait for slots: the specification of handing over.

Four units and records `a` to `d`, as in `test_overlap_order`; `w`: a state is written, so its
parameters were computed. `update until idle` ends when the updates have nothing to do but wait for
a slot.
"""

import contextlib
import threading

import pytest
from order.test_overlap_order import A, B, C, D, Steps
from unit.optim.test_pipeline import Harness

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.optim.handover import Handovers

PARAMETER_BYTES = 8192
EVERY = (A, B, C, D)


class SlottedSteps(Steps):
    """Steps of a model whose units come into slots of their own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.is_idle = threading.Event()
        self.slots = [bytearray(PARAMETER_BYTES) for _ in EVERY]
        wait_woken = self.harness.pipeline.wait_woken

        def wait_idle():
            self.is_idle.set()
            wait_woken()

        self.harness.pipeline.wait_woken = wait_idle

    def begin(self, *, upcoming=EVERY, slotted=EVERY):
        self.harness.store.events.clear()
        self.start(upcoming=upcoming, slotted=slotted)

    def give_slot(self, unit):
        """Gives a unit a slot; returns what fills it."""
        self.is_idle.clear()
        return self.deferred.hand_over(f"{'abcd'[unit]}#0", memoryview(self.slots[unit]))

    def written(self):
        """Returns the states written so far, when there is nothing more to do."""
        assert self.is_idle.wait(10)
        return [event[2] for event in self.events() if event[0] == "w"]


@pytest.fixture
def steps():
    steps = SlottedSteps(num_buffers=4)
    steps.run()
    yield steps
    with contextlib.suppress(OSError):
        steps.deferred.finish()
    steps.deferred.close()


def test_an_update_waits_until_its_unit_has_a_slot_and_fills_it(steps):
    steps.begin()
    before = steps.written()

    handed = steps.give_slot(A)
    after = steps.written()

    assert (before, after) == ([], ["a"])
    assert handed.done()
    assert steps.slots[A] == steps.harness.store.values["parameter/a#0"]
    assert steps.deferred.hand_over("a#0", memoryview(steps.slots[B])) is None


def test_records_are_read_ahead_while_their_update_waits(steps):
    steps.begin()
    steps.written()

    assert steps.events() == ["r a", "r b", "r c", "r d"]


def test_updates_follow_the_slots_not_the_records(steps):
    steps.begin()

    for unit in (C, A):
        steps.give_slot(unit)
        steps.written()

    assert steps.written() == ["c", "a"]


def test_units_that_have_no_slots_are_updated_at_once(steps):
    steps.begin(upcoming=(A, B), slotted=(B, C))

    assert steps.written() == ["a", "c", "d"]


def test_who_finishes_waits_for_no_slot(steps):
    steps.begin()
    handed = steps.give_slot(B)

    steps.deferred.finish()

    assert sorted(event[2] for event in steps.events() if event[0] == "w") == list("abcd")
    assert handed.done()


def test_a_unit_that_the_forward_waits_for_is_updated_whatever_has_slots(steps):
    steps.begin()
    steps.written()

    steps.deferred.wait_for(D)

    assert [event for event in steps.events() if event[0] == "w"] == ["w d"]
    assert steps.deferred.is_updated(D)


def test_a_needed_record_gets_a_buffer_though_all_are_taken_by_records_without_slots():
    steps = SlottedSteps(num_buffers=2)
    steps.run()
    steps.begin()
    steps.written()

    steps.deferred.wait_for(D)

    assert "w d" in steps.events()
    steps.deferred.close()


def test_joining_a_handover_does_not_hurry_it(steps):
    steps.begin()
    steps.give_slot(C).join()

    assert steps.written() == ["c"]


def test_a_failed_update_is_raised_where_its_slot_is_waited_for(steps):
    steps.begin()
    steps.harness.store.refusing.add("write state/b#0")
    handed = steps.give_slot(B)

    with pytest.raises(OSError, match="no space"):
        steps.deferred.finish()
    steps.deferred.forget_failure()

    assert handed.done()  # nobody waits for it any more


def test_a_closed_model_waits_for_no_slot(steps):
    steps.begin()

    steps.deferred.close()

    assert sorted(event[2] for event in steps.events() if event[0] == "w") == list("abcd")


def test_a_record_waits_for_all_its_units_that_are_expected():
    parameters = [ParameterFacts(name=n, shape=(64,), dtype="bfloat16") for n in "abc"]
    layout = build_layout(
        [UnitFacts(name=p.name, parameters=(p,)) for p in parameters], codec="split"
    )
    (record,) = layout.records
    unit_of = {shard.name: n for n, unit in enumerate(layout.units) for shard in unit.shards}
    names = [subgroup.name for subgroup in record.subgroups]
    handovers = Handovers(layout.records, unit_of)
    handovers.begin([0], expected=(0, 2))

    steps = [handovers.may_begin(0)]
    for name in (names[2], names[0]):
        handovers.add(name, Harness)
        steps.append(handovers.may_begin(0))

    assert steps == [False, False, True]
    assert list(handovers.take(0)) == [names[2], names[0]]
    assert not handovers.is_to_come(names[1])
    assert not handovers.is_written(names[1])
    handovers.finish(0)
    assert handovers.is_written(names[1])
