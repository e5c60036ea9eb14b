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

    def test_equal_arguments_give_equal_sequences(self, order):
        assert list(order.sequence(9, 4)) == list(order.sequence(9, 4))


class TestSequential(OrderConformance):
    name = "sequential"

    def test_every_step_goes_upwards(self, order):
        assert list(order.sequence(4, 1)) == [0, 1, 2, 3]
        assert list(order.sequence(4, 2)) == [0, 1, 2, 3]


def test_an_unknown_order_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"expected `sequential`, found `backwards`"):
        resolve_order("backwards")
