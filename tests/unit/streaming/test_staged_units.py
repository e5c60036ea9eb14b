"""Staging slots on the way to a device: an interrupt leaves none to two transfers."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload.errors import BudgetError
from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.memory import Arena, Budget, SlotPool
from offload.streaming.tier import StagedUnits


class FakeCopy:
    """Reads its source until it is let go."""

    def __init__(self):
        self.may_end = threading.Event()
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1
        self.may_end.wait()

    def done(self):
        return self.may_end.is_set()


class FakeDevice:
    def __init__(self):
        self.copies = []
        self.begun = threading.Event()
        self.is_over = False

    def copy_in(self, source, into):
        self.copies.append(FakeCopy())
        if self.is_over:
            self.copies[-1].may_end.set()
        self.begun.set()
        return self.copies[-1]


class FakeRead:
    def wait(self):
        pass


class FakeStorage:
    def start_read_into(self, unit, into, *, is_prefetch, part=None):
        return [FakeRead()]

    def wait_updated(self, transfers):
        pass


@pytest.fixture
def staged():
    """A tier with one staging slot, its device, and what starts a read."""
    parameter = ParameterFacts(name="p", shape=(64,), dtype="bfloat16")
    layout = build_layout([UnitFacts(name="a", parameters=(parameter,))], codec="split")
    (unit,) = layout.units
    arena = Arena(unit.num_bytes)
    arena.open()
    pool = SlotPool(
        arena.whole(),
        slot_bytes=unit.num_bytes,
        budget=Budget(1 << 20, tier="host"),
        purpose="slots",
    )
    device = FakeDevice()
    tier = StagedUnits(FakeStorage(), pool, device)
    into = torch.zeros(unit.num_bytes, dtype=torch.uint8)
    yield pool, device, lambda: tier.start_read(unit, into, is_prefetch=False)
    device.is_over = True  # of a copy that begins later too
    for copy in device.copies:
        copy.may_end.set()
    tier.close()
    arena.close()


@contextlib.contextmanager
def interrupted_submit(device, *, begins):
    """Interrupts a read as it hands its copy to the thread, which begins or not."""
    plain = ThreadPoolExecutor.submit

    def submit(self, *args):
        if begins:
            plain(self, *args)
            device.begun.wait()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", submit)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_slot_whose_copy_was_started_by_an_interrupted_read_waits_for_it(staged):
    pool, device, start = staged
    with interrupted_submit(device, begins=True):
        start()
    (first,) = device.copies

    found = pool.num_free
    threading.Timer(0.0, first.may_end.set).start()
    start()

    assert found == 0, "the copy still reads it"
    assert first.num_waits == 1


def test_a_slot_whose_copy_an_interrupt_kept_from_starting_is_free_again(staged):
    _, device, start = staged
    with interrupted_submit(device, begins=False):
        start()

    (read,) = start()

    device.begun.wait()
    assert len(device.copies) == 1
    assert not read.done()


def test_slots_that_nobody_gives_back_are_refused_with_what_to_do(staged):
    pool, _, start = staged
    lost = pool.try_lease()

    with pytest.raises(BudgetError, match=r"unit `a`.*all 1 taken.*close the session and resume"):
        start()

    del lost
    start()
