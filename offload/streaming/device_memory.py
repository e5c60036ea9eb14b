"""The arena of a device with memory of its own, cut into slots for units."""

from offload.devices import Device
from offload.memory import Budget, Region, SlotPool
from offload.plan.device import DevicePlan


class DeviceMemory:
    """The slots on a device, within a hard budget."""

    def __init__(self, plan: DevicePlan, device: Device, within: Budget | None = None) -> None:
        self.budget = Budget(plan.planned_bytes, tier="device", within=within)
        self.slots: SlotPool[Region] = SlotPool(
            device.allocate(plan.planned_bytes),
            slot_bytes=plan.slot_bytes,
            budget=self.budget,
            purpose="unit slots",
        )
