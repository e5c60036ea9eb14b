"""How the budget of a device with memory of its own is cut: all units, or slots for some."""

import math
from dataclasses import dataclass

from offload.errors import PlanError
from offload.layout import ModelLayout
from offload.plan.advice import how_to_fit
from offload.plan.host import Placement
from offload.plan.tiles import slot_bytes_of
from offload.sizes import format_size

_SUM_BYTES = 8
_WORDS_BYTES = 8
_SUMS_PER_COLUMN = 2 * 5
"""Of a row and a column: its sum, and of each half of it the number that it counts with and what
that gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Bytes of the device arena. What a model computes with besides parameters is outside it."""

    budget_bytes: int | None
    """None: as much as the plan takes."""
    slot_bytes: int
    num_slots: int
    smallest_bytes: int
    """The smallest budget with which this model runs: all of it where it lives on the device, else
    one co-resident set."""
    resident_bytes: int = 0
    """Of all units, where they live on the device."""
    sums_bytes: int = 0
    """Of the sums that show whether these were changed."""

    @property
    def planned_bytes(self) -> int:
        return self.resident_bytes + self.sums_bytes + self.slot_bytes * self.num_slots

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.smallest_bytes <= self.budget_bytes

    def require_fit(self, *, beside_bytes: int = 0, is_part: bool = False) -> None:
        """Raises PlanError if the budget is below the smallest.

        Args:
            beside_bytes: Of the tier, that other models have.
            is_part: Whether the user gave the model a part of it.
        """
        if not self.fits:
            assert self.budget_bytes is not None
            needed, remedy = "all parameters", ', or set `policy.parameters = "host"`'
            if not self.resident_bytes:
                count = self.smallest_bytes // self.slot_bytes
                needed, remedy = f"{count} slots of the largest unit", ""
            raise PlanError(
                f"the model does not fit `tiers.device.memory`: expected at least "
                f"{self.smallest_bytes} bytes ({format_size(self.smallest_bytes)}: {needed}), "
                f"found {self.budget_bytes} bytes ({format_size(self.budget_bytes)}); "
                + how_to_fit(
                    "device", self.smallest_bytes, beside_bytes=beside_bytes, is_part=is_part
                )
                + remedy
            )


def plan_device(
    layout: ModelLayout,
    *,
    budget_bytes: int | None,
    parameters: Placement,
    co_resident_units: int = 1,
    prefetch_distance: int = 2,
    tiled: frozenset[str] = frozenset(),
) -> DevicePlan:
    """Returns how `budget_bytes` are cut for `layout`; `fits` says whether they suffice.

    Args:
        budget_bytes: None: all units where they live on the device, else one co-resident set, and
            a slot for each unit fetched ahead.
        parameters: Where they live.
        co_resident_units: Most units that one call needs at once.
        prefetch_distance: Units fetched ahead.
        tiled: Names of units that no slot holds as a whole.
    """
    if parameters == "device":
        resident_bytes = sum(unit.num_bytes for unit in layout.units)
        largest_bytes = max((shard.padded_bytes for shard in layout.shards.values()), default=0)
        sums_bytes = sum_work_bytes(sum_columns(largest_bytes))
        sums_bytes += 2 * _SUM_BYTES * len(layout.shards)
        return DevicePlan(
            budget_bytes=budget_bytes,
            slot_bytes=0,
            num_slots=0,
            smallest_bytes=resident_bytes + sums_bytes,
            resident_bytes=resident_bytes,
            sums_bytes=sums_bytes,
        )
    slot_bytes = slot_bytes_of(layout, tiled)
    most = len(layout.units)
    if not slot_bytes:
        num_slots = 0
    elif budget_bytes is None:
        num_slots = min(most, co_resident_units + prefetch_distance)
    else:
        num_slots = max(min(most, budget_bytes // slot_bytes), co_resident_units)
    return DevicePlan(
        budget_bytes=budget_bytes,
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        smallest_bytes=slot_bytes * min(co_resident_units, most),
    )


def sum_columns(num_bytes: int) -> int:
    """Returns the columns in which at most `num_bytes` of a device's memory are summed.

    The least prime that is no less than the rows are.
    """
    columns = max(math.isqrt(num_bytes // _WORDS_BYTES) + 1, 2)
    while not all(columns % factor for factor in range(2, math.isqrt(columns) + 1)):
        columns += 1
    return columns


def sum_work_bytes(num_columns: int) -> int:
    """Returns the bytes of a device that it takes to sum others in so many columns."""
    return _SUM_BYTES * _SUMS_PER_COLUMN * num_columns
