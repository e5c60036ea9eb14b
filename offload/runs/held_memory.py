"""What a run's tiers hold of this process's memory."""

from offload.config import Config
from offload.devices.opening import is_process_memory
from offload.plan.run_plan import RunPlan


def held_bytes(config: Config, plan: RunPlan) -> int:
    """Returns the bytes of arenas that lie in this process's memory, once each was in use."""
    if plan.host is None:
        return plan.in_memory_bytes
    device = plan.device if is_process_memory(config.tiers.device.kind) else None
    return plan.host.planned_bytes + (device.planned_bytes if device else 0)
