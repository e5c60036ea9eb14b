"""Plans the memory of one wrapped model within its part of the budgets."""

import dataclasses
from dataclasses import dataclass

from offload.layout import ModelLayout
from offload.plan.device import DevicePlan, plan_device
from offload.plan.host import UNBOUNDED_BYTES, HostPlan
from offload.plan.host_cut import plan_host
from offload.streaming.wrap_options import WrapOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Gives the plans of a model for any layout of it.

    A model with a name takes no more than what it needs and what is fetched ahead.

    Attributes:
        options: How the model is wrapped.
        co_resident_units: The most units that are held at once.
        keeps_records: Whether the order of updates leaves records in memory.
        is_unified: Whether the device computes in host memory.
        tiled: Names of units that no slot holds as a whole.
    """

    options: WrapOptions
    co_resident_units: int
    keeps_records: bool
    is_unified: bool
    tiled: frozenset[str] = frozenset()

    def host(self, layout: ModelLayout) -> HostPlan:
        """Returns the plan of host memory, which may not fit."""
        budget = self.options.budget_bytes
        if budget is not None and self.options.name is None:
            return self._host_within(layout, budget)
        needed = self._host_within(layout, UNBOUNDED_BYTES)
        if budget is None or needed.planned_bytes > budget:
            return needed if budget is None else self._host_within(layout, budget)
        return dataclasses.replace(needed, budget_bytes=budget)

    def device(self, layout: ModelLayout) -> DevicePlan:
        """Returns the plan of a device with memory of its own, which may not fit."""
        budget = self.options.device_budget_bytes
        if budget is None or self.options.name is None:
            return self._device_within(layout, budget)
        needed = self._device_within(layout, None)
        if needed.planned_bytes > budget:
            return self._device_within(layout, budget)
        return dataclasses.replace(needed, budget_bytes=budget)

    def _host_within(self, layout: ModelLayout, budget_bytes: int) -> HostPlan:
        options = self.options
        return plan_host(
            layout,
            budget_bytes=budget_bytes,
            parameters=options.parameters,
            optimizer=options.optimizer,
            gradient_dtype=options.gradient_dtype,
            co_resident_units=self.co_resident_units,
            prefetch_distance=options.prefetch_distance,
            keeps_records=self.keeps_records,
            is_training=options.is_training,
            is_unified=self.is_unified,
            activations=options.activations.plan,
            spills_gradients=options.spills_gradients,
            tiled=self.tiled,
            window_bytes=options.window_bytes,
        )

    def _device_within(self, layout: ModelLayout, budget_bytes: int | None) -> DevicePlan:
        return plan_device(
            layout,
            budget_bytes=budget_bytes,
            parameters=self.options.parameters,
            co_resident_units=self.co_resident_units,
            prefetch_distance=self.options.prefetch_distance,
            tiled=self.tiled,
        )
