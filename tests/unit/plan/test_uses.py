from offload.plan.uses import Uses, reads_of


def reads(forward, backward, num_slots, **options):
    uses = Uses(forward=tuple(forward), backward=tuple(backward))
    found = reads_of(uses, num_slots, **options)
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
