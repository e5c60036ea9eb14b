import pytest

from offload.streaming.prefetch_distance import PrefetchDistance

MB = 10**6


def seen(*, use_s, fetch_s, least=1, most=8):
    """Returns the distance after units of 1 MB, used for `use_s` each, that took `fetch_s`."""
    distance = PrefetchDistance(least=least, most=most)
    for _ in range(40):
        distance.note_use(MB, duration_s=use_s)
        distance.note_fetch(MB, within_s=fetch_s, was_late=True)
    return distance.units


@pytest.mark.parametrize("use_s, fetch_s, units", [
    (1.0, 0.5, 2),
    (1.0, 1.0, 2),
    (1.0, 3.0, 4),
    (1.0, 2.5, 4),
    (1.0, 100.0, 8),
])  # fmt: skip
def test_as_many_are_in_flight_as_are_used_while_one_is_fetched_and_one_more(use_s, fetch_s, units):
    assert seen(use_s=use_s, fetch_s=fetch_s) == units


def test_before_anything_was_late_it_is_the_least():
    distance = PrefetchDistance(least=3, most=8)
    distance.note_use(MB, duration_s=1.0)
    distance.note_fetch(MB, within_s=9.0, was_late=False)  # complete when asked: it says nothing

    assert distance.units == 3


def test_it_is_never_less_than_the_least_nor_more_than_there_is_room_for():
    assert seen(use_s=1.0, fetch_s=0.1, least=5) == 5
    assert seen(use_s=1.0, fetch_s=9.0, most=3) == 3
    assert seen(use_s=1.0, fetch_s=9.0, least=4, most=3) == 4


def test_0_stays_0():
    assert seen(use_s=1.0, fetch_s=9.0, least=0) == 0


def test_a_link_that_became_faster_shortens_it_again():
    distance = PrefetchDistance(least=1, most=8)
    distance.note_use(MB, duration_s=1.0)
    distance.note_fetch(MB, within_s=6.0, was_late=True)
    before = distance.units

    for _ in range(40):
        distance.note_fetch(MB, within_s=0.9, was_late=False)

    assert (before, distance.units) == (7, 2)


def test_empty_units_and_no_time_count_for_nothing():
    distance = PrefetchDistance(least=1, most=8)
    distance.note_use(0, duration_s=1.0)
    distance.note_use(MB, duration_s=0.0)
    distance.note_fetch(0, within_s=1.0, was_late=True)
    distance.note_fetch(MB, within_s=0.0, was_late=True)

    assert distance.units == 1
