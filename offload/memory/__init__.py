"""Host memory: arenas, slot pools, hard budgets, and storages that give their slots back."""

from offload.memory.arena import Arena
from offload.memory.budget import Budget
from offload.memory.heap import large_blocks_mapped, trim_heap, trim_heap_beyond
from offload.memory.pool import Region, Slot, SlotPool
from offload.memory.storages import memory_of, storage_over, view_as

__all__ = [
    "Arena",
    "Budget",
    "Region",
    "Slot",
    "SlotPool",
    "large_blocks_mapped",
    "memory_of",
    "storage_over",
    "trim_heap",
    "trim_heap_beyond",
    "view_as",
]
