"""The host arena of a wrapped model, cut as its plan says."""

import torch

from offload.layout import ModelLayout
from offload.memory import Arena, Budget, SlotPool, storage_over
from offload.plan.host import HostPlan


class HostMemory:
    """Gradient region, resident parameters and state, unit slots, record buffers.

    What is always in use is leased at once; slots and buffers are leased while they are in use.

    Attributes:
        gradients: Region of all accumulators.
        slots: Unit slots, or None where parameters are resident.
        buffers: Record buffers, or None where there is nothing to move.
        scratch: Memory for reading state outside an update: the larger of slots and buffers.
    """

    def __init__(self, plan: HostPlan) -> None:
        self.budget = Budget(min(plan.budget_bytes, plan.planned_bytes), tier="host")
        arena = Arena(plan.planned_bytes)
        arena.open()
        self.gradients = arena.take(plan.gradient_bytes)
        self._parameters = arena.take(plan.resident_parameter_bytes)
        self._state = arena.take(plan.resident_state_bytes)
        slots = arena.take(plan.slot_bytes * plan.num_slots)
        window = arena.take(plan.buffer_bytes * plan.num_buffers)
        self.budget.lease(plan.gradient_bytes, "gradients")
        self.budget.lease(plan.resident_parameter_bytes, "parameters")
        self.budget.lease(plan.resident_state_bytes, "optimizer state")
        self.slots = self._pool(slots, plan.slot_bytes, "unit slots")
        self.buffers = self._pool(window, plan.buffer_bytes, "record buffers")
        self.scratch = max(slots, window, key=len)

    def flat_parameters(self, layout: ModelLayout) -> dict[str, torch.Tensor]:
        """Returns the resident flat shards by name, each padded to the transfer alignment."""
        flat: dict[str, torch.Tensor] = {}
        offset = 0
        for shard in layout.shards.values():
            memory = self._parameters[offset : offset + shard.padded_bytes]
            flat[shard.name] = storage_over(memory).view(getattr(torch, shard.dtype))
            offset += shard.padded_bytes
        return flat

    def records(self, layout: ModelLayout) -> dict[str, torch.Tensor]:
        """Returns the resident records by name, uint8, padded, all zero."""
        records: dict[str, torch.Tensor] = {}
        offset = 0
        for record in layout.records:
            memory = self._state[offset : offset + record.padded_bytes]
            # A rule without state has empty records, over which there is no storage.
            records[record.name] = (
                storage_over(memory) if memory else torch.empty(0, dtype=torch.uint8)
            )
            offset += record.padded_bytes
        return records

    def _pool(self, region: memoryview, slot_bytes: int, purpose: str) -> SlotPool | None:
        if not len(region):
            return None
        return SlotPool(region, slot_bytes=slot_bytes, budget=self.budget, purpose=purpose)
