"""Items in a given order, of which some may wait: against a list."""

import random

import pytest

from offload.plan.reading_order import ReadingOrder


@pytest.mark.parametrize("seed", range(20))
def test_it_gives_what_a_search_in_a_list_gives(seed):
    chosen = random.Random(seed)
    items = list(range(chosen.choice([0, 1, 2, 30])))
    chosen.shuffle(items)
    besides = {item for item in items if chosen.random() < 0.5}
    order = ReadingOrder(items)

    while items:
        others = [item for item in items if item not in besides]
        assert order
        assert order.peek() == items[0]
        assert order.peek(besides=besides) == (others or items)[0]
        taken = chosen.choice([items[0], (others or items)[0], chosen.choice(items)])
        order.take(taken)
        items.remove(taken)
        besides -= {taken}

    assert not order
    assert order.peek() is None
    assert order.peek(besides=besides) is None
