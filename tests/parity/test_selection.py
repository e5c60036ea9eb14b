"""What is chosen of the combinations of a test's parameters has every pair of their values."""

import itertools

import pytest
from parity.selection import covering_pairs


def pairs_of(cases):
    return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}


def product(**sizes):
    values = itertools.product(*(range(size) for size in sizes.values()))
    return [dict(zip(sizes, each, strict=True)) for each in values]


@pytest.mark.parametrize("given", [[], [5, 17]])
def test_each_pair_is_there_and_far_from_all_combinations_are(given):
    cases = product(form=7, kind=4, slots=3, reentrant=2, device=1)

    chosen = covering_pairs(cases, given)

    assert pairs_of(cases[at] for at in chosen) == pairs_of(cases)
    assert chosen >= set(given)
    assert 7 * 4 <= len(chosen) <= 7 * 4 + 8


def test_of_two_parameters_and_of_one_all_combinations_are_there():
    assert len(covering_pairs(product(place=4, codec=2))) == 8
    assert len(covering_pairs(product(device=1, place=4))) == 4
    assert len(covering_pairs(product(place=4))) == 4
    assert len(covering_pairs(product(device=1))) == 1


def test_a_combination_that_was_left_out_by_hand_is_not_missed():
    cases = [case for case in product(a=3, b=3, c=3) if case["a"] != case["b"]]

    chosen = [cases[at] for at in covering_pairs(cases)]

    assert pairs_of(chosen) == pairs_of(cases)
