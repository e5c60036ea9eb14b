import pytest

from offload.plan.uses import CallEnd, Uses, reads_of


def uses_of(forward, backward, ends=()):
    """Ends as pairs: a unit, and the uses that began before."""
    found = tuple(CallEnd(unit=unit, num_before=num_before) for unit, num_before in ends)
    return Uses(forward=tuple(forward), backward=tuple(backward), ends=found)


def reads(forward, backward, num_slots, *, ends=(), **options):
    found = reads_of(uses_of(forward, backward, ends), num_slots, **options)
    return [sorted(each.elements()) for each in (found.forward, found.backward)]


def test_the_last_units_of_forward_stay_for_backward():
    found = [reads([0, 1, 2, 3], [3, 2, 1], num_slots) for num_slots in (0, 1, 2, 3, 4)]

    assert [forward for forward, _ in found] == [[0, 1, 2, 3]] * 5
    assert [backward for _, backward in found] == [[1, 2, 3], [1, 2], [1], [], []]


def test_a_unit_at_both_ends_is_read_again_and_takes_the_slot_of_another():
    assert reads([0, 1, 2, 3, 0], [0, 3, 2, 1], 2) == [[0, 0, 1, 2, 3], [1, 2]]
    assert reads([0, 1, 2, 3, 0], [0, 3, 2, 1], 4) == [[0, 1, 2, 3], []]


def test_a_run_of_one_unit_is_one_read():
    assert reads([0, 0, 1, 1], [1, 1, 0, 0], 1) == [[0, 1], [0]]


def test_a_unit_used_twice_in_backward_is_read_again_unless_there_are_slots_until_then():
    assert reads([0, 1, 2], [2, 1, 0, 2], 2) == [[0, 1, 2], [0, 2]]
    assert reads([0, 1, 2], [2, 1, 0, 2], 3) == [[0, 1, 2], []]


def test_a_unit_in_pieces_is_read_by_each_pass_that_uses_it():
    assert reads([0, 1, 0], [0, 1], 3, tiled={0}) == [[0, 1], [0]]
    assert reads([0, 1], [1], 3, tiled={0}) == [[0, 1], []]


@pytest.mark.parametrize("num_slots, backward", [(2, [1, 2]), (3, [1]), (4, [])])
def test_a_call_around_others_takes_one_slot_and_its_unit_stays_from_its_end_on(
    num_slots, backward
):
    # 0 is held until the end of forward, and asked for first in backward.
    found = reads([0, 1, 2, 3], [0, 3, 2, 1], num_slots, ends=[(1, 2), (2, 3), (3, 4), (0, 4)])

    assert found == [[0, 1, 2, 3], backward]


def test_two_units_of_one_call_both_stay_where_there_is_a_slot_for_each():
    ends = [(0, 1), (1, 3), (2, 3)]

    assert reads([0, 1, 2], [1, 2, 0], 2, ends=ends) == [[0, 1, 2], [0]]
    assert reads([0, 1, 2], [2, 1, 0], 2, ends=ends) == [[0, 1, 2], [0]]


def test_what_backward_ends_with_and_forward_begins_with_is_carried_over():
    assert reads_of(uses_of([0, 1], [1, 0]), 1).carried == 0
    assert reads_of(uses_of([0, 1], [1]), 1).carried is None
    assert reads_of(uses_of([0, 1], [1, 0]), 1, tiled={0}).carried is None


def test_a_forward_after_another_one_finds_what_that_left():
    found = reads_of(uses_of([0, 1, 0], [0, 1]), 1)
    assert found.forward == {0: 2, 1: 1}
    assert found.forward_again == {0: 1, 1: 1}
    assert reads_of(uses_of([0, 1], [1, 0]), 2).forward_again == {}
