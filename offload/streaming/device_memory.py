"""The arena of a device with memory of its own: all units, or slots for some."""

from offload.devices import Device
from offload.memory import Budget, Region, SlotPool
from offload.plan.device import DevicePlan


class DeviceMemory:
    """What is planned on a device, within a hard budget.

    Attributes:
        parameters: For all units, end to end, where they live on the device.
        slots: Where they do not.

    Sums over parameters that live there are taken beside the arena, within the budget.
    """

    def __init__(self, plan: DevicePlan, device: Device, within: Budget | None = None) -> None:
        self.budget = Budget(plan.planned_bytes, tier="device", within=within)
        self.budget.lease(plan.sums_bytes, "sums over parameters")
        region = device.allocate(plan.planned_bytes - plan.sums_bytes)
        self.budget.lease(plan.resident_bytes, "parameters")
        self.parameters: Region = region[: plan.resident_bytes]
        self.slots: SlotPool[Region] = SlotPool(
            region[plan.resident_bytes :],
            slot_bytes=plan.slot_bytes,
            budget=self.budget,
            purpose="unit slots",
        )
