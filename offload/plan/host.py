"""How the host budget is cut: gradients, parameter slots, resident bytes and the window."""

from dataclasses import dataclass, field
from typing import Literal

from offload.errors import PlanError
from offload.layout import ModelLayout
from offload.layout.units import TRANSFER_ALIGNMENT
from offload.plan.activations import ActivationPlan
from offload.plan.advice import how_to_fit
from offload.plan.gradients import SPILL_SLOTS, GradientPlan, keep_gradients, spill_gradients
from offload.plan.tiles import slot_bytes_of
from offload.plan.window import (
    LEAST_BUFFERS,
    WINDOW_BYTES,
    WindowCut,
    cut_window,
    cut_window_beside_cache,
    waits_with,
)
from offload.sizes import format_size

Placement = Literal["device", "host", "storage"]
"""A tier. What lives on a device has its place in host memory too, where updates change it."""

WRITTEN_AT_ONCE = 6
"""Records that a commit has on their way to storage where updates have none."""
UNBOUNDED_BYTES = 1 << 62
"""The budget of a run that is all in memory."""
WORKSPACE_SHARE = 12
"""A cache, gradients that stay beside spilled ones, and slots beyond those needed leave one part in
so many of the budget free: workspaces and generated code of libraries grow with the model and no
budget covers them (40 MiB beside 400 were measured with torch 2.13 on the CPU, 2026-11-29)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Bytes of the host arenas, by purpose. All sizes are multiples of the transfer alignment."""

    budget_bytes: int
    resident_parameter_bytes: int
    resident_state_bytes: int
    slot_bytes: int
    num_slots: int
    state_buffer_bytes: int
    """Of one record's state where that lives on storage."""
    parameter_buffer_bytes: int
    """Of one record's parameters where these live on storage."""
    num_buffers: int
    """Records in the window whose state was not in memory."""
    num_places: int
    """Records in the window at one time. Each has a buffer for its parameters and gradients."""
    num_cached: int
    """Records whose state stays in memory between steps."""
    smallest_bytes: int
    """The smallest budget with which this model and these placements run."""
    activation_bytes: int = 0
    """For saved activations: where they lie, or through which they go to storage."""
    activation_slot_bytes: int = TRANSFER_ALIGNMENT
    gradients: GradientPlan = field(default_factory=GradientPlan)

    @property
    def buffer_bytes(self) -> int:
        """Of what of one record is on storage: state, parameters, gradients."""
        return self.state_buffer_bytes + self.beside_buffer_bytes

    @property
    def beside_buffer_bytes(self) -> int:
        """Of what of one record is on storage beside its state."""
        return self.parameter_buffer_bytes + self.gradients.buffer_bytes

    @property
    def window_bytes(self) -> int:
        """Of all records that are read, updated and written at one time."""
        beside = self.beside_buffer_bytes * self.num_places
        return self.state_buffer_bytes * self.num_buffers + beside

    @property
    def workspace_bytes(self) -> int:
        """What a cache leaves free of the budget."""
        return self.budget_bytes // WORKSPACE_SHARE

    @property
    def num_gradient_slots(self) -> int:
        """Shards whose spilled gradients are in memory at once."""
        return SPILL_SLOTS if self.gradients.spilled else 0

    @property
    def num_written_at_once(self) -> int:
        """The most records that are on their way to storage, by updates and by commits."""
        return self.num_places or WRITTEN_AT_ONCE

    @property
    def planned_bytes(self) -> int:
        return (
            self.gradients.fixed_bytes
            + self.resident_parameter_bytes
            + self.resident_state_bytes
            + self.slot_bytes * self.num_slots
            + self.window_bytes
            + self.state_buffer_bytes * self.num_cached
            + self.activation_bytes
        )

    @property
    def prefetched_bytes(self) -> int:
        """Q: bytes of records for which there are buffers while no update runs."""
        return self.state_buffer_bytes * self.num_buffers

    @property
    def fits(self) -> bool:
        return self.smallest_bytes <= self.budget_bytes

    def _for_activations(self) -> str:
        taken = self.activation_bytes
        return f", {format_size(taken)} for activations" if taken else ""

    def require_fit(self, *, beside_bytes: int = 0, is_part: bool = False) -> None:
        """Raises PlanError if the budget is below the smallest.

        Args:
            beside_bytes: Of the tier, that other models have.
            is_part: Whether the user gave the model a part of it.
        """
        if not self.fits:
            raise PlanError(
                f"the model does not fit `tiers.host.memory`: expected at least "
                f"{self.smallest_bytes} bytes ({format_size(self.smallest_bytes)}: "
                f"{format_size(self.gradients.fixed_bytes)} of gradients, "
                f"{format_size(self.resident_parameter_bytes + self.resident_state_bytes)} "
                f"resident, slots and window{self._for_activations()}), found "
                f"{self.budget_bytes} bytes ({format_size(self.budget_bytes)}); "
                + how_to_fit(
                    "host", self.smallest_bytes, beside_bytes=beside_bytes, is_part=is_part
                )
            )


def plan_host(
    layout: ModelLayout,
    *,
    budget_bytes: int,
    parameters: Placement,
    optimizer: Placement,
    gradient_dtype: Literal["parameter", "float32"] = "parameter",
    co_resident_units: int = 1,
    prefetch_distance: int = 2,
    keeps_records: bool = False,
    is_training: bool = True,
    is_unified: bool = True,
    activations: ActivationPlan | None = None,
    spills_gradients: bool = False,
    tiled: frozenset[str] = frozenset(),
    window_bytes: int = WINDOW_BYTES,
) -> HostPlan:
    """Returns how `budget_bytes` are cut for `layout`; `fits` says whether they suffice.

    Args:
        co_resident_units: Most units that one call needs at once (tied parameters).
        prefetch_distance: Units fetched ahead, each into a slot beside those in use.
        keeps_records: Whether the order finds records in memory: what is left is their cache.
        is_unified: Whether the device computes in host memory. Else slots stage what is on its
            way between storage and the device.
        activations: What of them moves through host memory.
        spills_gradients: Whether gradients go to storage where the budget is too short for all.
        tiled: Names of units that no slot holds as a whole.
        window_bytes: Of records that are read, updated and written at one time, at most.
    """
    moved = activations if activations is not None and is_training else ActivationPlan()
    kept = keep_gradients(layout, gradient_dtype) if is_training else GradientPlan()
    on_host = parameters != "storage"
    resident_parameters = layout.parameter_bytes if on_host else 0
    slot_bytes = 0 if on_host else slot_bytes_of(layout, tiled)
    resident_state = layout.state_bytes if optimizer == "host" and is_training else 0
    state_buffer = parameter_buffer = 0
    if is_training and optimizer == "storage":
        state_buffer = max((record.padded_bytes for record in layout.records), default=0)
    if is_training and parameters == "storage":
        parameter_buffer = max((r.padded_parameter_bytes for r in layout.records), default=0)
    min_slots = 0 if on_host else co_resident_units if is_unified else 1
    fixed = resident_parameters + resident_state + moved.memory_bytes + min_slots * slot_bytes

    def smallest_with(gradients: GradientPlan) -> int:
        buffer = state_buffer + parameter_buffer + gradients.buffer_bytes
        return fixed + gradients.fixed_bytes + buffer

    gradients, smallest = kept, smallest_with(kept)
    if spills_gradients and is_training:
        spilled = spill_gradients(layout, gradient_dtype)
        smallest = min(smallest, smallest_with(spilled))
        if budget_bytes < smallest_with(kept) and smallest_with(spilled) < smallest_with(kept):
            gradients = spilled
    buffer_bytes = state_buffer + parameter_buffer + gradients.buffer_bytes
    free = max(budget_bytes - smallest_with(gradients), 0)
    extra_slots = min(prefetch_distance, free // slot_bytes) if slot_bytes else 0
    free += buffer_bytes - extra_slots * slot_bytes

    beside_bytes = buffer_bytes - state_buffer
    sizes = {
        "state_bytes": state_buffer,
        "beside_bytes": beside_bytes,
        "num_records": len(layout.records),
    }
    workspace = budget_bytes // WORKSPACE_SHARE

    def num_more_slots(room_bytes: int) -> int:  # what is left lets calls hold more units
        if not slot_bytes or not is_unified or budget_bytes >= UNBOUNDED_BYTES:
            return 0
        without = max(len(layout.units) - min_slots - extra_slots, 0)
        return min(without, max(room_bytes, 0) // slot_bytes)

    window = cut_window(min(window_bytes, free), **sizes)
    if keeps_records and state_buffer:
        cuts = [
            cut_window_beside_cache(window_bytes, free_bytes=free, most_buffers=most, **sizes)
            for most in (None, *range(LEAST_BUFFERS, 0, -1))
        ]
        room = free - workspace

        def cost(cut: WindowCut) -> float:
            cached = min(len(layout.records), max(room - cut.num_bytes, 0) // state_buffer)
            moved = buffer_bytes * len(layout.records) - state_buffer * cached
            waits = waits_with(cut.num_at_once(cached, len(layout.records)))
            kept = slot_bytes * num_more_slots(room - cut.num_bytes - state_buffer * cached)
            return waits * 2 * moved - kept

        window = min(cuts[:1] if gradients.spilled else cuts, key=cost)
    left = free - window.num_bytes
    if gradients.spilled:
        room = max(left - workspace, 0)
        gradients = spill_gradients(layout, gradient_dtype, room_bytes=room)
        left -= gradients.resident_bytes
    cached = 0
    if keeps_records and state_buffer:
        cached = min(len(layout.records), max(left - workspace, 0) // state_buffer)
    extra_slots += num_more_slots(left - state_buffer * cached - workspace)
    return HostPlan(
        budget_bytes=budget_bytes,
        resident_parameter_bytes=resident_parameters,
        resident_state_bytes=resident_state,
        slot_bytes=slot_bytes,
        num_slots=min_slots + extra_slots,
        state_buffer_bytes=state_buffer,
        parameter_buffer_bytes=parameter_buffer,
        num_buffers=window.num_buffers,
        num_places=window.num_places,
        num_cached=cached,
        smallest_bytes=smallest,
        activation_bytes=moved.memory_bytes,
        activation_slot_bytes=moved.slot_bytes,
        gradients=gradients,
    )
