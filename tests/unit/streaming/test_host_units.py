"""Copies from host memory that an update waits for."""

import threading

import pytest
import torch

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.streaming.tier import HostUnits


class FakeCopy:
    """Is over when somebody waits, with an error or without."""

    def __init__(self, error=None, run=lambda: None):
        self.error = error
        self.run = run
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1
        self.run()
        if self.error is not None:
            raise self.error

    def done(self):
        return False


class FakeDevice:
    def __init__(self, copies):
        self.copies = iter(copies)

    def copy_in(self, source, into):
        return next(self.copies)


def units_with(*copies):
    """Returns a tier that starts each of `copies` in turn, and what starts the next one."""
    parameter = ParameterFacts(name="p", shape=(64,), dtype="bfloat16")
    layout = build_layout([UnitFacts(name="a", parameters=(parameter,))], codec="split")
    (unit,) = layout.units
    memory = torch.zeros(unit.num_bytes, dtype=torch.uint8)
    tier = HostUnits(layout, {unit.shards[0].name: memory.clone()}, FakeDevice(copies))
    return tier, lambda: tier.start_read(unit, memory, is_prefetch=False)


def test_a_copy_that_failed_is_raised_once_and_the_others_are_waited_for():
    failed, other = FakeCopy(OSError("link")), FakeCopy()
    tier, start = units_with(failed, other)
    start()
    start()

    with pytest.raises(OSError, match="link"):
        tier.settle()
    tier.settle()

    assert (failed.num_waits, other.num_waits) == (1, 1)


def test_of_several_failures_the_first_is_raised():
    tier, start = units_with(FakeCopy(OSError("one")), FakeCopy(OSError("two")))
    start()
    start()

    with pytest.raises(OSError, match="one"):
        tier.settle()
    tier.settle()


def test_a_copy_may_start_while_others_are_waited_for():
    is_waiting, may_end = threading.Event(), threading.Event()

    def wait():
        is_waiting.set()
        assert may_end.wait(10)

    late, next_one = FakeCopy(run=wait), FakeCopy()
    tier, start = units_with(late, next_one)
    start()
    settling = threading.Thread(target=tier.settle)
    settling.start()
    assert is_waiting.wait(10)

    starting = threading.Thread(target=start)
    starting.start()
    starting.join(5)
    has_started = not starting.is_alive()

    may_end.set()
    settling.join()
    starting.join()
    assert has_started
    assert next_one.num_waits == 1


def test_a_wait_that_was_interrupted_is_taken_up_again():
    copy = FakeCopy(KeyboardInterrupt())
    tier, start = units_with(copy)
    start()
    with pytest.raises(KeyboardInterrupt):
        tier.settle()
    copy.error = None

    tier.settle()

    assert copy.num_waits == 2
