"""What every device must do: subclass `DeviceConformance` and give it a device.

Each test holds for CUDA as for the CPU; `tests/gpu` runs the same class on a GPU.
"""

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest
import torch

from offload.devices import Device
from offload.errors import BudgetError
from offload.memory import Arena

SIZES = (1, 63, 64, 4096, 4097, (1 << 20) + 1)
"""Bytes: one, alignment less one, alignment, a page, a page and one, an odd large number."""


class DeviceConformance(ABC):
    """Subclass it, and return a device that is not open from `make_device`."""

    @abstractmethod
    def make_device(self) -> Device:
        """Returns a new device."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """An open device."""
        device = self.make_device()
        device.open()
        yield device
        device.close()

    def test_open_and_close_may_be_called_again(self) -> None:
        device = self.make_device()
        device.open()
        device.open()

        device.close()
        device.close()

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_bytes_come_back_as_they_went_in(self, device: Device, num_bytes: int) -> None:
        source = _host(num_bytes)
        expected = _fill(source)
        slot = device.tensor_over(device.allocate(num_bytes))
        into = torch.empty(num_bytes, dtype=torch.uint8)

        device.copy_in(source, slot).wait()
        device.copy_out(slot, into).synchronize()

        assert torch.equal(into, expected)
        assert slot.device == device.torch_device

    def test_memory_outside_the_arena_is_filled_by_a_copy(self, device: Device) -> None:
        source = _host(4097)
        expected = _fill(source)
        into = device.empty(4097)

        device.copy_in(source, into).wait()

        assert torch.equal(into.cpu(), expected)
        assert into.device == device.torch_device
        assert device.empty(0).numel() == 0

    def test_computing_after_wait_sees_what_was_copied(self, device: Device) -> None:
        source = _host(1 << 20)
        values = torch.frombuffer(source, dtype=torch.float32)
        values.fill_(3.0)
        slot = device.tensor_over(device.allocate(1 << 20))

        device.copy_in(source, slot).wait()
        total = (slot.view(torch.float32) * 2.0).sum()

        assert float(total) == 6.0 * (1 << 18)

    def test_a_copy_out_brings_what_was_computed_before_it(self, device: Device) -> None:
        ones = torch.ones(1 << 18, device=device.torch_device)
        into = torch.zeros(1 << 18)

        result = ones
        for _ in range(20):
            result = result + ones
        copy = device.copy_out(result, into)
        copy.synchronize()

        assert copy.done()
        assert torch.equal(into, torch.full((1 << 18,), 21.0))

    def test_a_copy_is_done_once_it_was_waited_for(self, device: Device) -> None:
        source = _host(4096)
        slot = device.tensor_over(device.allocate(4096))

        copy = device.copy_in(source, slot)
        copy.synchronize()

        assert copy.done()
        copy.wait()

    def test_every_tensor_over_a_slot_has_a_storage_of_its_own(self, device: Device) -> None:
        region = device.allocate(8192)
        deaths: list[str] = []

        first = device.tensor_over(region[:4096], on_death=lambda: deaths.append("first"))
        second = device.tensor_over(region[4096:], on_death=lambda: deaths.append("second"))
        alias = first[10:20].view(2, 5)
        del first
        gc.collect()

        assert deaths == []
        del alias
        gc.collect()
        assert deaths == ["first"]
        del second
        gc.collect()
        assert deaths == ["first", "second"]

    def test_a_slot_that_was_given_back_is_filled_anew(self, device: Device) -> None:
        region = device.allocate(4096)
        into = torch.empty(4096, dtype=torch.uint8)

        for round_ in range(3):
            source = _host(4096)
            torch.frombuffer(source, dtype=torch.uint8).fill_(round_)
            slot = device.tensor_over(region)
            device.copy_in(source, slot).wait()
            device.copy_out(slot, into).synchronize()
            del slot

            assert bool((into == round_).all())

    def test_memory_in_use_changes_after_the_uses_that_were_noted(self, device: Device) -> None:
        num_bytes, into = 1 << 20, torch.empty(1 << 18)
        slot = device.tensor_over(device.allocate(num_bytes))
        totals = []

        for round_ in range(3):
            source = _host(num_bytes)
            torch.frombuffer(source, dtype=torch.float32).fill_(float(round_))
            for half in (slice(0, num_bytes // 2), slice(num_bytes // 2, num_bytes)):
                device.copy_in(source[half], slot[half]).wait()
                device.note_uses([slot])
            result = slot.view(torch.float32)
            for _ in range(20):
                result = result + slot.view(torch.float32)
            device.note_uses([slot])
            totals.append(result)

        for round_, result in enumerate(totals):
            device.copy_out(result, into).synchronize()
            assert bool((into == 21.0 * round_).all())

    def test_an_empty_slot_is_given_back_too(self, device: Device) -> None:
        deaths: list[int] = []

        slot = device.tensor_over(device.allocate(0), on_death=lambda: deaths.append(1))

        assert slot.numel() == 0
        del slot
        gc.collect()
        assert deaths == [1]

    def test_copies_from_several_threads_all_arrive(self, device: Device) -> None:
        num_bytes, sources = 1 << 16, [_host(1 << 16) for _ in range(8)]
        for index, source in enumerate(sources):
            torch.frombuffer(source, dtype=torch.uint8).fill_(index)
        region = device.allocate(8 * num_bytes)
        slots = [device.tensor_over(region[i * num_bytes : (i + 1) * num_bytes]) for i in range(8)]
        into = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(8)]

        def carry(index: int) -> None:
            device.copy_in(sources[index], slots[index]).wait()
            device.copy_out(slots[index], into[index]).synchronize()

        threads = [threading.Thread(target=carry, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert all(bool((values == index).all()) for index, values in enumerate(into))

    def test_registered_memory_is_copied_as_any_other(self, device: Device) -> None:
        source = _host(1 << 20)
        expected = _fill(source)
        slot = device.tensor_over(device.allocate(1 << 20))
        into = torch.empty(1 << 20, dtype=torch.uint8)

        device.register_host(source)
        copy = device.copy_in(source, slot)
        copy.wait()
        copy.synchronize()
        device.unregister_host(source)
        device.copy_out(slot, into).synchronize()

        assert torch.equal(into, expected)

    def test_memory_facts_are_of_the_device(self, device: Device) -> None:
        facts = device.memory_facts()

        assert 0 < facts.free_bytes <= facts.total_bytes

    def test_more_than_there_is_is_refused_with_what_there_is(self, device: Device) -> None:
        if device.is_unified:
            pytest.skip("host memory is bounded by the host's budget")
        too_much = 2 * device.memory_facts().total_bytes

        with pytest.raises(BudgetError, match=r"cannot allocate .* free"):
            device.allocate(too_much)


def _host(num_bytes: int) -> memoryview:
    arena = Arena(num_bytes)
    arena.open()
    return arena.take(num_bytes)


def _fill(memory: memoryview) -> torch.Tensor:
    """Fills `memory` with bytes that differ and returns a copy of them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (len(memory),), dtype=torch.uint8, generator=generator)
    torch.frombuffer(memory, dtype=torch.uint8).copy_(values)
    return values
