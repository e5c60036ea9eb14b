"""Which of two directions the next transfer goes in."""

import pytest

from offload.storage.fair_queue import chosen
from offload.storage.transfer import Operation

READ, WRITE = Operation.READ, Operation.WRITE


def taken(waiting, queue_depth, *, num=40):
    """Which directions are in flight when neither ends and both go on waiting."""
    in_flight = {READ: 0, WRITE: 0}
    for _ in range(min(num, queue_depth)):
        in_flight[chosen(waiting, in_flight, queue_depth)] += 1
    return in_flight[READ], in_flight[WRITE]


@pytest.mark.parametrize(
    "queue_depth, expected", [(1, (1, 0)), (3, (3, 0)), (4, (3, 1)), (8, (6, 2)), (32, (24, 8))]
)
def test_the_less_urgent_direction_has_a_quarter(queue_depth, expected):
    assert taken({READ: 0, WRITE: 2}, queue_depth) == expected
    assert taken({READ: 2, WRITE: 1}, queue_depth) == expected[::-1]


@pytest.mark.parametrize("queue_depth, expected", [(1, (1, 0)), (2, (1, 1)), (8, (4, 4))])
def test_at_the_same_priority_both_have_a_half(queue_depth, expected):
    assert taken({READ: 1, WRITE: 1}, queue_depth) == expected


def test_a_direction_alone_has_all():
    assert taken({WRITE: 2}, 8) == (0, 8)


def test_places_go_to_the_direction_that_has_fewer_than_its_share():
    waiting = {READ: 0, WRITE: 2}

    assert chosen(waiting, {READ: 7, WRITE: 1}, 8) is WRITE
    assert chosen(waiting, {READ: 5, WRITE: 2}, 8) is READ
