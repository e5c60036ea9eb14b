"""What activations take of the host tier, and in what pieces they move."""

from dataclasses import dataclass
from typing import Literal

from offload.layout.units import TRANSFER_ALIGNMENT
from offload.sizes import MIB, round_up

SLOTS_TO_STORAGE = 16
"""Slots of the memory through which activations go to storage: enough for several to be under
way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """Host memory for saved activations, cut into slots; 0 where none are moved."""

    memory_bytes: int = 0
    slot_bytes: int = TRANSFER_ALIGNMENT


def plan_activations(
    offload: Literal["none", "host", "storage"], *, memory_bytes: int, threshold_bytes: int
) -> ActivationPlan:
    """Returns how `memory_bytes` are cut.

    Where activations lie in the slots, these are as small as the smallest that is moved: each
    leaves at most one slot partly unused. Where they pass through, slots are as large as blocks.

    Args:
        offload: Where activations go.
        memory_bytes: Of the host tier, at most.
        threshold_bytes: Of the smallest that is moved.
    """
    if offload == "none":
        return ActivationPlan()
    wanted = threshold_bytes if offload == "host" else memory_bytes // SLOTS_TO_STORAGE
    slot_bytes = min(round_up(max(wanted, 1), TRANSFER_ALIGNMENT), MIB)
    num_slots = max(memory_bytes // slot_bytes, 1)
    return ActivationPlan(memory_bytes=num_slots * slot_bytes, slot_bytes=slot_bytes)
