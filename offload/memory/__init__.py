"""Host memory: arenas, slot pools, hard budgets, and storages that give their slots back."""

from offload.memory.arena import Arena
from offload.memory.budget import Budget
from offload.memory.heap import trim_heap
from offload.memory.pool import Region, Slot, SlotPool
from offload.memory.storages import memory_of, storage_over, view_as

__all__ = [
    "Arena",
    "Budget",
    "Region",
    "Slot",
    "SlotPool",
    "memory_of",
    "storage_over",
    "trim_heap",
    "view_as",
]
