"""The plan of a run: whether it fits, bytes per tier, and what a step will move."""

from dataclasses import asdict, dataclass, field
from typing import Any

from offload.errors import PlanError
from offload.layout import ModelLayout
from offload.plan.device import DevicePlan
from offload.plan.host import HostPlan
from offload.plan.lost_work import CommitForecast
from offload.plan.machine import Machine
from offload.plan.machine_profile import PathProfile
from offload.plan.storage import StoragePlan
from offload.plan.traffic import ModelBytes, StepTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run will need and move. Nothing has been loaded or written for it."""

    layout: ModelLayout
    host: HostPlan | None
    """None where everything is in ordinary memory (`offload=false`)."""
    storage: StoragePlan | None
    """None where nothing is stored."""
    storage_path: str
    device: DevicePlan | None = None
    """None on the unified `cpu` device, and where everything is in ordinary memory."""
    traffic: StepTraffic
    policy: dict[str, str]
    endurance_bytes: int | None = None
    """What each drive may be written in its life, where that is given."""
    num_paths: int = 1
    warnings: tuple[str, ...] = ()
    """What makes the run less safe than it could be."""
    activations: dict[str, str] = field(default_factory=dict)
    """What becomes of activations."""
    outside_budgets: dict[str, int | None] = field(default_factory=dict)
    """Bytes that no budget covers, by what they are for; None where they are not bounded."""
    commits: CommitForecast | None = None
    """None where there are none."""
    machine: Machine | None = None
    profile: PathProfile | None = None
    """What `offload bench io --tune` measured on the path, where it did."""

    @property
    def reasons(self) -> list[str]:
        """Why the run does not fit; empty if it does."""
        found = [] if self.host is None else _reasons(self.host)
        found.extend([] if self.device is None else _reasons(self.device))
        if self.storage is not None:
            found.extend(self.storage.reasons(path=self.storage_path))
        return found

    @property
    def fits(self) -> bool:
        return not self.reasons

    def require_fit(self) -> None:
        """Raises PlanError with every reason if the run does not fit."""
        if not self.fits:
            raise PlanError("; ".join(self.reasons))

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of `offload plan`; what does not apply or is not known is None."""
        host, storage, device = self.host, self.storage, self.device
        return {
            "fits": self.fits,
            "reasons": self.reasons,
            "smallest": {
                "host_memory": host.smallest_bytes if host else None,
                "device_memory": device.smallest_bytes if device else None,
                "storage": storage.planned_bytes if storage else None,
            },
            "tiers": {
                "device": {
                    "budget_bytes": device.budget_bytes if device else None,
                    "planned_bytes": device.planned_bytes if device else None,
                },
                "host": {
                    "budget_bytes": host.budget_bytes if host else None,
                    "planned_bytes": host.planned_bytes if host else None,
                    "cut": asdict(host) if host else None,
                },
                "storage": {
                    "budget_bytes": storage.budget_bytes if storage else None,
                    "planned_bytes": storage.planned_bytes if storage else None,
                    "cut": asdict(storage.space) if storage else None,
                },
            },
            "policy": self.policy,
            "activations": self.activations,
            "outside_budgets": self.outside_budgets,
            "warnings": list(self.warnings),
            "drive_steps": self._drive_steps(),
            "parameters": self.layout.num_parameters,
            "state_bytes": ModelBytes.of(self.layout).state_bytes,
            "predicted": self._predicted(),
            "commits": self.commits.to_json(step_s=None) if self.commits else None,
            "machine": self._machine(),
        }

    def _machine(self) -> dict[str, Any] | None:
        if self.machine is not None:
            return self.machine.to_json()
        return None if self.profile is None else {"paths": [asdict(self.profile)]}

    def _predicted(self) -> dict[str, float | int | None]:
        return {
            "step_s": None,
            "forward_s": None,
            "backward_s": None,
            "update_s": None,
            "exposed_io_s": None,
            "bound_s": None,
            "read_bytes_per_step": self.traffic.read_bytes,
            "write_bytes_per_step": self.traffic.write_bytes,
            "rss_peak_bytes": None,
            "written_bytes_per_day": None,
            "tokens_to_hide_io": None,
        }

    def _drive_steps(self) -> int | None:
        """Steps until a drive reaches its rated endurance, if all paths get equal shares."""
        per_drive = self.traffic.write_bytes // self.num_paths
        if self.endurance_bytes is None or not per_drive:
            return None
        return self.endurance_bytes // per_drive


def _reasons(plan: HostPlan | DevicePlan) -> list[str]:
    try:
        plan.require_fit()
    except PlanError as error:
        return [str(error)]
    return []
