"""Whether this machine has the memory that a plan takes."""

from dataclasses import dataclass

from offload.errors import PlanError
from offload.sizes import MIB, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableMemory:
    """The memory that a process may use."""

    machine_bytes: int
    cgroup_bytes: int | None = None
    """The least limit of the cgroups around it; None where there is none below the machine's."""

    @property
    def num_bytes(self) -> int:
        return self.machine_bytes if self.cgroup_bytes is None else self.cgroup_bytes

    def describe(self) -> str:
        """Returns how much there is, and what limits it."""
        if self.cgroup_bytes is None:
            return f"the {format_size(self.machine_bytes)} of this machine"
        return f"the {format_size(self.cgroup_bytes)} that the cgroup allows"

    def require(
        self, host_bytes: int, *, smallest_bytes: int, is_bounded: bool, device_bytes: int = 0
    ) -> None:
        """Raises PlanError where more memory is taken than there is.

        Args:
            host_bytes: Of the host tier, that are taken.
            smallest_bytes: The smallest host budget with which the model runs.
            is_bounded: Whether there is a budget; else all is kept in memory.
            device_bytes: Of the device tier, where that lies in this memory too.
        """
        taken_bytes = host_bytes + device_bytes
        if taken_bytes <= self.num_bytes:
            return
        remedy = (
            "offload it, with `tiers.host.memory` below that, or use a machine with more memory"
        )
        if is_bounded:
            remedy = "use a machine with more memory, or a smaller model"
            if device_bytes:
                remedy = f"lower `tiers.device.memory`, {remedy}"
            if smallest_bytes + device_bytes <= self.num_bytes:
                remedy = (
                    f"lower `tiers.host.memory` well below that, to "
                    f'"{-(-smallest_bytes // MIB)}MiB" at least'
                )
        tiers = "host memory"
        if device_bytes:
            tiers = f"the host tier and the emulated device, {format_size(device_bytes)} its own"
        raise PlanError(
            f"the plan takes more memory than there is: expected no more than {self.describe()}, "
            f"found {taken_bytes} bytes ({format_size(taken_bytes)}) of {tiers}; {remedy}"
        )

    def warning(self, budget_bytes: int | None, planned_bytes: int) -> str | None:
        """Returns what is wrong with a budget that a plan does not use up; None: nothing is."""
        if budget_bytes is None or budget_bytes <= self.num_bytes:
            return None
        return (
            f"`tiers.host.memory` of {format_size(budget_bytes)} is more than {self.describe()}; "
            f"the plan takes {format_size(planned_bytes)} of it. Set it below what there is"
        )
