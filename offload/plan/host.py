"""What the host budget holds: gradients, parameter slots, resident bytes and the window."""

from dataclasses import dataclass, field
from typing import Literal

from offload.errors import PlanError
from offload.layout.units import TRANSFER_ALIGNMENT
from offload.plan.advice import how_to_fit
from offload.plan.gradients import SPILL_SLOTS, GradientPlan
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
