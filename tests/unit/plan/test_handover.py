import pytest

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.handover import handed_over
from offload.plan.uses import CallEnd, Uses

A, B, C, D = range(4)


@pytest.fixture
def layout():
    """Units `a` to `d`, of which two make a record."""
    parameters = [ParameterFacts(name=n, shape=(2048,), dtype="bfloat16") for n in "abcd"]
    units = [UnitFacts(name=p.name, parameters=(p,)) for p in parameters]
    layout = build_layout(units, codec="split", record_elements=4096)
    assert len(layout.records) == 2
    return layout


def found(layout, num_slots, forward=None, *, ends=(), **options):
    uses = None if forward is None else Uses(forward=forward, backward=(), ends=ends)
    records = [record.name for record in layout.records]
    names = handed_over(layout, num_slots, records=records, uses=uses, **options)
    return "".join(sorted(name[0] for name in names))


@pytest.mark.parametrize("num_slots, expected", [(0, ""), (1, "ac"), (2, "abcd")])
def test_a_record_finds_the_slots_that_there_are_as_its_first_unit_is_used(
    layout, num_slots, expected
):
    assert found(layout, num_slots) == expected


def test_the_first_is_the_one_that_forward_uses_first(layout):
    assert found(layout, 1, (D, C, B, A)) == "bd"
    assert found(layout, 2, (A, C, B, D)) == "ac"
    assert found(layout, 3, (A, C, B, D)) == "abcd"


def test_a_unit_that_is_used_again_before_takes_a_slot(layout):
    assert found(layout, 2, (A, C, A, B, D)) == "ac"
    assert found(layout, 3, (A, C, A, B, D)) == "abc"


def test_a_unit_that_a_call_holds_takes_a_slot(layout):
    ends = [
        CallEnd(unit=unit, num_before=place) for unit, place in ((B, 2), (C, 3), (D, 4), (A, 4))
    ]

    assert found(layout, 2, (A, B, C, D)) == "abcd"
    assert found(layout, 2, (A, B, C, D), ends=tuple(ends)) == "abc"


def test_what_forward_does_not_use_or_no_slot_holds_is_not_handed_over(layout):
    assert found(layout, 4, (A, C)) == "ac"
    assert found(layout, 4, tiled={"b"}) == "acd"


def test_after_a_commit_only_what_the_first_slots_hold_is(layout):
    assert found(layout, 3, (D, C, B, A), is_finished_at_once=True) == "bcd"


def test_a_unit_in_pieces_brings_its_record_when_it_is_used(layout):
    # The record of `a` and `b` is updated for `b`, when the one slot is another's.
    assert found(layout, 1, (B, C, A, D), tiled={"b"}) == "c"
    assert found(layout, 2, (B, C, A, D), tiled={"b"}) == "c"
    assert found(layout, 2, (B, A, C, D), tiled={"b"}) == "acd"
