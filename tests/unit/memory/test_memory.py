"""Arenas, pools, budgets and storages over slots."""

import functools
import gc
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupts import interrupted_at

from offload.errors import BudgetError
from offload.memory import Arena, Budget, SlotPool, storage_over, view_as


def make_pool(num_slots: int = 2, slot_bytes: int = 4096) -> tuple[SlotPool, Budget]:
    arena = Arena(num_slots * slot_bytes)
    arena.open()
    budget = Budget(num_slots * slot_bytes, tier="host")
    region = arena.take(num_slots * slot_bytes)
    return SlotPool(region, slot_bytes=slot_bytes, budget=budget, purpose="slots"), budget


def flags_of(region: memoryview) -> list[str]:
    """Of the kernel's mapping that the region begins in."""
    address = np.frombuffer(region, np.uint8).ctypes.data
    flags: list[str] = []
    is_inside = False
    with Path("/proc/self/smaps").open(encoding="ascii") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, stop = (int(number, 16) for number in first.split("-"))
                is_inside = start <= address < stop
            elif is_inside and first == "VmFlags:":
                flags = line.split()[1:]
    return flags


def test_children_do_not_get_the_regions_that_they_shall_not_have() -> None:
    arena = Arena(3 * 8192)
    arena.open()

    before, own, after = (arena.take(8192, is_inherited=number != 1) for number in range(3))

    assert "dc" in flags_of(own)  # proc_pid_smaps(5): do not copy area on fork
    assert "dc" not in flags_of(before) + flags_of(after)


def test_budget_refuses_one_byte_too_many_and_names_the_holders() -> None:
    budget = Budget(100, tier="host")
    budget.lease(60, "gradients")

    with pytest.raises(BudgetError, match=r"window.*gradients 60 B.*tiers\.host\.memory"):
        budget.lease(41, "window")

    assert budget.leased_bytes == 60
    budget.lease(40, "window")
    assert budget.peak_bytes == 100


def test_budget_peak_is_the_most_leased_at_one_time() -> None:
    budget = Budget(100, tier="host")

    budget.lease(70, "a")
    budget.release(70, "a")
    budget.lease(30, "b")

    assert budget.peak_bytes == 70
    assert budget.leased_bytes == 30


def test_pool_has_no_slot_left_after_the_last_lease() -> None:
    pool, budget = make_pool(num_slots=2)

    first, second = pool.try_lease(), pool.try_lease()

    assert first is not None and second is not None
    assert pool.try_lease() is None
    assert budget.leased_bytes == 8192
    pool.release(first)
    again = pool.try_lease()
    assert again is not None and again.index == first.index


def test_slot_comes_back_only_when_the_last_alias_is_gone() -> None:
    pool, budget = make_pool(num_slots=1)
    slot = pool.try_lease()
    assert slot is not None
    index = slot.index
    base = storage_over(slot.memory, on_death=functools.partial(pool.release, slot))
    del slot
    alias = view_as(base, offset_bytes=64, num_elements=8, dtype=torch.float32).view(2, 4).t()

    del base
    gc.collect()
    still_leased = pool.try_lease() is None
    alias.zero_()
    del alias
    gc.collect()

    assert still_leased
    again = pool.try_lease()
    assert again is not None and again.index == index
    assert budget.peak_bytes == 4096


def test_arena_views_outlive_close() -> None:
    arena = Arena(8192)
    arena.open()
    tensor = storage_over(arena.take(4096))

    arena.close()
    tensor.fill_(7)

    assert int(tensor.sum()) == 7 * 4096


def test_arena_regions_are_page_aligned_and_disjoint() -> None:
    arena = Arena(3 * 4096)
    arena.open()

    first, second = storage_over(arena.take(100)), storage_over(arena.take(4096))

    assert first.data_ptr() % 4096 == 0
    assert second.data_ptr() == first.data_ptr() + 4096


def test_a_slot_that_was_lost_comes_back_with_its_bytes() -> None:
    pool, budget = make_pool(num_slots=1)
    slot = pool.try_lease()
    assert slot is not None
    in_flight = np.frombuffer(slot.memory[64:128], dtype=np.uint8)

    del slot
    held = pool.num_free, budget.leased_bytes
    del in_flight

    assert held == (0, 4096)
    assert (pool.num_free, budget.leased_bytes) == (1, 0)
    assert pool.try_lease() is not None


def test_a_slot_that_was_released_is_not_taken_back_again() -> None:
    pool, budget = make_pool(num_slots=1)
    first = pool.try_lease()
    assert first is not None
    pool.release(first)
    second = pool.try_lease()

    pool.release(first)
    del first

    assert second is not None
    assert (pool.num_free, budget.leased_bytes) == (0, 4096)


def test_slots_of_a_pool_that_is_gone_are_leased_no_more() -> None:
    pool, budget = make_pool(num_slots=2)
    slot = pool.try_lease()

    del pool

    assert slot is not None
    assert budget.leased_bytes == 0


class ToldOf(Budget):
    """Tells who asks it for memory."""

    asked = threading.Event()

    def leasing(self, num_bytes, purpose):  # type: ignore[no-untyped-def]
        self.asked.set()
        return super().leasing(num_bytes, purpose)


def test_a_slot_that_comes_back_within_a_lease_waits_for_no_thread_that_waits_for_it() -> None:
    arena = Arena(8192)
    arena.open()
    budget = ToldOf(8192, tier="host")
    pool = SlotPool(arena.take(8192), slot_bytes=4096, budget=budget, purpose="slots")
    slots = [pool.try_lease()]
    lease = threading.Thread(target=pool.try_lease, daemon=True)

    def lease_more() -> None:
        with budget.leasing(0, "another pool"):
            budget.asked.clear()
            lease.start()
            budget.asked.wait(0.2)  # where it asks only once it has the lock, it never does
            slots.clear()

    more = threading.Thread(target=lease_more, daemon=True)
    more.start()
    for thread in more, lease:
        thread.join(10)

    assert not more.is_alive()
    assert not lease.is_alive()


@pytest.mark.parametrize("within", [True, False], ids=["of a model", "of its own"])
def test_an_interrupt_at_any_line_of_a_lease_leaves_the_slot_free_or_leased(within: bool) -> None:
    whole = Budget(8192, tier="host")
    budget = Budget(8192, tier="host", within=whole) if within else whole
    region = memoryview(bytearray(8192))
    pool = SlotPool(region, slot_bytes=4096, budget=budget, purpose="slots")

    def lease_and_release() -> None:
        slot = pool.try_lease()
        assert slot is not None
        pool.release(slot)

    for line in itertools.count(1):
        was_interrupted = interrupted_at(line, lease_and_release)
        assert pool.num_free == 2, f"line {line}"
        both = pool.try_lease(), pool.try_lease()
        assert None not in both, f"line {line}"
        assert whole.leased_bytes == 8192
        for slot in both:
            assert slot is not None
            pool.release(slot)
        assert budget.leased_bytes == whole.leased_bytes == 0
        if not was_interrupted:
            break

    assert line > 20
