import threading

import pytest

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.optim.handover import HandedOver, Handovers
from offload.optim.pending_records import PendingRecords
from offload.policy import resolve_overlap


@pytest.fixture
def layout():
    """Units of one record each."""
    parameters = [ParameterFacts(name=n, shape=(2048,), dtype="bfloat16") for n in "abc"]
    units = [UnitFacts(name=p.name, parameters=(p,)) for p in parameters]
    return build_layout(units, codec="split", record_elements=2048)


@pytest.fixture
def pending(layout):
    """Of a step in which `b` and `c` are read, and none of their units has a slot."""
    records = layout.records
    handovers = Handovers(records, {"a": 0, "b": 1, "c": 2})
    handovers.begin([0, 1, 2], expected={0, 1, 2})
    handovers.add(records[0].subgroups[0].name, HandedOver(memoryview(bytearray(4096)), print))
    pending = PendingRecords(resolve_overlap("forward"), threading.Condition())
    pending.begin(records, [0, 1, 2], handovers)
    for record in records[1:]:
        pending.take(record)
    return pending


def test_a_record_keeps_waiting_for_its_slot_while_what_is_needed_may_still_come(layout, pending):
    pending.need([0])  # not read: the window is full

    found = pending.choose(layout.records[1:], is_stuck=False)

    assert found is None


def test_where_nothing_else_can_make_room_the_last_record_gives_its_slot_up(layout, pending):
    assert pending.choose(layout.records[1:], is_stuck=True) is None  # nobody waits

    pending.need([0])

    assert pending.choose(layout.records[1:], is_stuck=True) is layout.records[2]


def test_once_what_is_needed_is_there_the_others_wait_again(layout, pending):
    pending.need([0])
    pending.take(layout.records[0])

    assert pending.choose(layout.records[1:], is_stuck=True) is None
    assert pending.choose(layout.records, is_stuck=True) is layout.records[0]
