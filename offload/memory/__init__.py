"""Host memory: what there is, arenas, slot pools, hard budgets, storages that give slots back."""

from offload.memory.arena import Arena
from offload.memory.budget import Budget
from offload.memory.heap import HeapHoles, large_blocks_mapped, trim_heap
from offload.memory.pool import Region, Slot, SlotPool
from offload.memory.storages import address_of, memory_of, storage_over, view_as
from offload.memory.usable import usable_memory
from offload.memory.watched_page import WatchedPage, try_watch

__all__ = [
    "Arena",
    "Budget",
    "HeapHoles",
    "Region",
    "Slot",
    "SlotPool",
    "WatchedPage",
    "address_of",
    "large_blocks_mapped",
    "memory_of",
    "storage_over",
    "trim_heap",
    "try_watch",
    "usable_memory",
    "view_as",
]
