"""What every order of records promises, whichever it is."""

import pytest

from offload.errors import ConfigError
from offload.policy import Order, resolve_order


class OrderConformance:
    """Each subclass names one order."""

    name: str

    @pytest.fixture
    def order(self) -> Order:
        return resolve_order(self.name)

    def test_it_is_found_by_its_name(self, order):
        assert isinstance(order, Order)
        assert order.name == self.name

    @pytest.mark.parametrize("num_records", [0, 1, 2, 7, 64])
    @pytest.mark.parametrize("step", [1, 2, 3])
    def test_each_record_is_taken_once_in_every_step(self, order, num_records, step):
        sequence = order.sequence(num_records, step)

        assert sorted(sequence) == list(range(num_records))

    @pytest.mark.parametrize("capacity", [0, 1, 3, 7, 99])
    @pytest.mark.parametrize("num_records", [0, 1, 7, 64])
    @pytest.mark.parametrize("step", [1, 2])
    def test_no_more_records_are_kept_than_fit(self, order, num_records, capacity, step):
        kept = order.kept(num_records, capacity, step)

        assert len(kept) <= min(capacity, num_records)
        assert kept <= set(range(num_records))

    def test_equal_arguments_give_equal_sequences(self, order):
        assert list(order.sequence(9, 4)) == list(order.sequence(9, 4))


class TestSequential(OrderConformance):
    name = "sequential"

    def test_every_step_goes_upwards(self, order):
        assert list(order.sequence(4, 1)) == [0, 1, 2, 3]
        assert list(order.sequence(4, 2)) == [0, 1, 2, 3]

    def test_nothing_is_kept(self, order):
        assert order.kept(4, 3, 1) == frozenset()


class TestAlternating(OrderConformance):
    name = "alternating"

    def test_steps_go_forth_and_back(self, order):
        assert [list(order.sequence(4, step)) for step in (1, 2, 3)] == [
            [0, 1, 2, 3],
            [3, 2, 1, 0],
            [0, 1, 2, 3],
        ]

    def test_what_a_step_ends_with_is_what_the_next_begins_with(self, order):
        for step in (1, 2, 3, 4):
            kept = order.kept(7, 3, step)

            assert kept == set(list(order.sequence(7, step + 1))[:3])


class TestResident(OrderConformance):
    name = "resident"

    def test_the_same_evenly_spread_records_are_kept_in_every_step(self, order):
        assert order.kept(12, 4, 1) == order.kept(12, 4, 2) == {0, 3, 6, 9}
        assert list(order.sequence(3, 2)) == [0, 1, 2]


def test_an_unknown_order_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"expected .*`sequential`.*, found `backwards`"):
        resolve_order("backwards")
