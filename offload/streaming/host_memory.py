"""The host arena of a wrapped model, cut as its plan says."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from offload.errors import BudgetError
from offload.layout import ModelLayout
from offload.memory import Arena, Budget, SlotPool, storage_over
from offload.plan.host import HostPlan


class HostMemory:
    """Gradient region, resident parameters and state, unit slots, record buffers.

    What is always in use is leased at once; slots and buffers are leased while they are in use.

    Attributes:
        whole: All of the arena.
        gradients: Region of the accumulators that stay in memory.
        gradient_slots: Slots of shards whose gradients are spilled; None where none are.
        gradient_buffers: Slots of a record's spilled gradients in the window; None likewise.
        slots: Unit slots, or None where parameters are resident.
        states: Slots of records, in the window and cached; None where the state is resident.
        parameters: Slots of a record's parameters in the window; None where they are resident.
        activations: Slots of pieces of activations; None where none are moved.
        transfers: The memory of all these slots: what the I/O engine moves all the time. A forked
            child does not have it.
    """

    def __init__(self, plan: HostPlan, within: Budget | None = None) -> None:
        """Takes an arena and cuts it.

        Args:
            within: The budget of all models of the session.
        """
        capacity = min(plan.budget_bytes, plan.planned_bytes)
        self.budget = Budget(capacity, tier="host", within=within)
        arena = Arena(plan.planned_bytes)
        arena.open()
        self.whole = arena.whole() if plan.planned_bytes else memoryview(b"")
        self.gradients = arena.take(plan.gradients.resident_bytes)
        self._parameters = arena.take(plan.resident_parameter_bytes)
        self._state = arena.take(plan.resident_state_bytes)
        num_states = plan.num_buffers + plan.num_cached
        slots_end = plan.slot_bytes * plan.num_slots
        states_end = slots_end + plan.state_buffer_bytes * num_states
        parameters_end = states_end + plan.parameter_buffer_bytes * plan.num_places
        shards_end = parameters_end + plan.gradients.slot_bytes * plan.num_gradient_slots
        end = shards_end + plan.gradients.buffer_bytes * plan.num_places
        self.transfers = arena.take(end, is_inherited=False)
        activations = arena.take(plan.activation_bytes)
        self.budget.lease(plan.gradients.resident_bytes, "gradients")
        self.budget.lease(plan.resident_parameter_bytes, "parameters")
        self.budget.lease(plan.resident_state_bytes, "optimizer state")
        self.slots = self._pool(self.transfers[:slots_end], plan.slot_bytes, "unit slots")
        self.states = self._pool(
            self.transfers[slots_end:states_end], plan.state_buffer_bytes, "records"
        )
        self.parameters = self._pool(
            self.transfers[states_end:parameters_end],
            plan.parameter_buffer_bytes,
            "parameters of records",
        )
        self.gradient_slots = self._pool(
            self.transfers[parameters_end:shards_end], plan.gradients.slot_bytes, "gradients"
        )
        self.gradient_buffers = self._pool(
            self.transfers[shards_end:], plan.gradients.buffer_bytes, "gradients of records"
        )
        self.activations = self._pool(activations, plan.activation_slot_bytes, "activations")

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
            records[record.name] = storage_over(memory)
            offset += record.padded_bytes
        return records

    @contextlib.contextmanager
    def lend_scratch(
        self, num_parameter_bytes: int, *, make_room: Callable[[], None]
    ) -> Iterator[memoryview]:
        """Lends memory for reading state outside an update; empty if all of it is resident.

        Args:
            num_parameter_bytes: Of the largest subgroup whose parameters live on storage. It fits
                a slot; a buffer fits every record, and is taken where it fits both.
            make_room: Called to give slots back where all are taken.

        Raises:
            BudgetError: All slots are held.
        """
        pool = self.states or self.parameters
        if pool is None or pool.slot_bytes < num_parameter_bytes:
            pool = self.slots
        if pool is None:
            yield memoryview(b"")
            return
        slot = pool.try_lease()
        if slot is None:
            make_room()
            slot = pool.try_lease()
        if slot is None:
            raise BudgetError(
                f"cannot read the state: all {pool.num_slots} slots are held, by calls that run "
                "now or tensors that point into them; drop those, or raise `tiers.host.memory`"
            )
        with pool.releasing(slot):
            yield slot.memory

    def _pool(
        self, region: memoryview, slot_bytes: int, purpose: str
    ) -> SlotPool[memoryview] | None:
        if not len(region):
            return None
        return SlotPool(region, slot_bytes=slot_bytes, budget=self.budget, purpose=purpose)
