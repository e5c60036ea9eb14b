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

    def require(self, planned_bytes: int, *, smallest_bytes: int, is_bounded: bool) -> None:
        """Raises PlanError where `planned_bytes` of host memory are more than there are.

        Args:
            planned_bytes: Of the host tier, that are taken.
            smallest_bytes: The smallest budget with which the model runs.
            is_bounded: Whether there is a budget; else all is kept in memory.
        """
        if planned_bytes <= self.num_bytes:
            return
        remedy = (
            "offload it, with `tiers.host.memory` below that, or use a machine with more memory"
        )
        if is_bounded:
            remedy = "use a machine with more memory, or a smaller model"
            if smallest_bytes <= self.num_bytes:
                remedy = (
                    f"lower `tiers.host.memory` well below that, to "
                    f'"{-(-smallest_bytes // MIB)}MiB" at least'
                )
        raise PlanError(
            f"the plan takes more memory than there is: expected no more than {self.describe()}, "
            f"found {planned_bytes} bytes ({format_size(planned_bytes)}) of host memory; {remedy}"
        )

    def warning(self, budget_bytes: int | None, planned_bytes: int) -> str | None:
        """Returns what is wrong with a budget that a plan does not use up; None: nothing is."""
        if budget_bytes is None or budget_bytes <= self.num_bytes:
            return None
        return (
            f"`tiers.host.memory` of {format_size(budget_bytes)} is more than {self.describe()}; "
            f"the plan takes {format_size(planned_bytes)} of it. Set it below what there is"
        )
