"""The emulated device shows what a GPU would do with a wrong order."""

import gc

import pytest
import torch

from offload.devices import EmulatedDevice, OrderError
from offload.errors import BudgetError
from offload.memory import Arena

LATE_S = 0.2
"""Latency at which a copy is surely still in flight when the next line runs."""


@pytest.fixture
def late():
    device = EmulatedDevice(memory_bytes=1 << 20, link_latency_s=LATE_S)
    device.open()
    yield device
    device.close()


@pytest.fixture
def prompt():
    device = EmulatedDevice(memory_bytes=1 << 20)
    device.open()
    yield device
    device.close()


def _ones(num_elements=1024):
    arena = Arena(4 * num_elements)
    arena.open()
    memory = arena.take(4 * num_elements)
    torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
    return memory


def test_a_slot_holds_nan_until_its_copy_is_over(late):
    slot = late.tensor_over(late.allocate(4096))

    copy = late.copy_in(_ones(), slot)
    early = slot.view(torch.float32).clone()
    copy.wait()

    assert early.isnan().all()
    assert slot.view(torch.float32).eq(1.0).all()


def test_the_source_is_read_as_late_as_it_may_be(late):
    # So that a staging slot that is reused too soon gives wrong bytes.
    source, slot = _ones(), late.tensor_over(late.allocate(4096))

    copy = late.copy_in(source, slot)
    torch.frombuffer(source, dtype=torch.float32).fill_(2.0)
    copy.wait()

    assert slot.view(torch.float32).eq(2.0).all()


def test_a_gradient_is_read_as_late_as_it_may_be(late):
    gradient, into = torch.ones(8), torch.zeros(8)

    copy = late.copy_out(gradient, into)
    assert not copy.done()
    assert into.eq(0.0).all()
    gradient.fill_(2.0)
    copy.synchronize()

    assert into.eq(2.0).all()


def test_computing_before_the_wait_raises(prompt):
    slot = prompt.tensor_over(prompt.allocate(4096))
    copy = prompt.copy_in(_ones(), slot)
    copy.synchronize()  # the bytes are there, but nothing orders computing after them

    with prompt.checking(), pytest.raises(OrderError, match="nobody has waited for"):
        slot.view(torch.float32).sum()

    copy.wait()
    with prompt.checking():
        assert slot.view(torch.float32).sum() == 1024


def test_computing_with_a_slot_that_nothing_was_copied_to_raises(prompt):
    slot = prompt.tensor_over(prompt.allocate(4096))

    with prompt.checking(), pytest.raises(OrderError, match="found no copy to it"):
        slot + 1


def test_each_of_several_copies_to_a_slot_must_be_waited_for(prompt):
    slot = prompt.tensor_over(prompt.allocate(8192))
    first = prompt.copy_in(_ones(), slot[:4096])
    second = prompt.copy_in(_ones(), slot[4096:])

    first.wait()

    with prompt.checking(), pytest.raises(OrderError):
        slot.sum()
    second.wait()
    with prompt.checking():
        slot.sum()


def test_memory_in_use_is_not_filled_before_its_uses_were_noted(prompt):
    slot = prompt.tensor_over(prompt.allocate(4096))
    prompt.copy_in(_ones(), slot).wait()

    with pytest.raises(OrderError, match="call `note_uses` after the last use"):
        prompt.copy_in(_ones(), slot)

    prompt.note_uses([slot])
    prompt.copy_in(_ones(), slot).wait()
    with prompt.checking():
        slot.sum()


def test_a_slot_that_was_given_back_holds_nan(prompt):
    region = prompt.allocate(4096)
    slot = prompt.tensor_over(region)
    prompt.copy_in(_ones(), slot).wait()

    del slot
    gc.collect()

    assert torch.frombuffer(region, dtype=torch.float32).isnan().all()
    assert torch.frombuffer(region, dtype=torch.bfloat16).isnan().all()


def test_what_was_copied_out_before_its_bytes_were_valid_raises(prompt):
    slot = prompt.tensor_over(prompt.allocate(4096))

    with pytest.raises(OrderError):
        prompt.copy_out(slot, torch.empty(4096, dtype=torch.uint8))


def test_the_memory_is_bounded_over_all_arenas(prompt):
    prompt.allocate(1 << 19)

    with pytest.raises(BudgetError, match=r"cannot allocate 600 KiB .*512 KiB of 1 MiB free"):
        prompt.allocate(600 << 10)


def test_a_link_has_a_rate_and_carries_one_copy_after_the_other():
    device = EmulatedDevice(memory_bytes=1 << 20, link_bytes_per_s=4096 / LATE_S)
    device.open()
    first, second = (device.tensor_over(device.allocate(4096)) for _ in range(2))

    copies = [device.copy_in(_ones(), slot) for slot in (first, second)]
    copies[0].synchronize()

    assert not copies[1].done()
    copies[1].synchronize()
    assert device.copied_in_bytes == 8192
    device.close()
