"""The plan of a run: whether it fits, bytes per tier, and what a step will move."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offload.errors import PlanError
from offload.layout import ModelLayout
from offload.plan.alternatives import Adoption, Alternative, fastest
from offload.plan.device import DevicePlan
from offload.plan.explanation import Choice, Saving, Uncovered, explain, not_covered
from offload.plan.gradients import keep_gradients
from offload.plan.host import HostPlan
from offload.plan.link import LinkTraffic
from offload.plan.lost_work import CommitForecast
from offload.plan.machine import Machine
from offload.plan.machine_profile import PathProfile
from offload.plan.prediction import Choices, Prediction
from offload.plan.rhythm import Rhythm
from offload.plan.storage import StoragePlan
from offload.plan.tiles import Pieces, slot_bytes_of
from offload.plan.traffic import ModelBytes, StepTraffic
from offload.plan.usable_memory import UsableMemory
from offload.sizes import format_size

_BUDGETS = {
    "host": "`tiers.host.memory`",
    "device": "`tiers.device.memory`",
    "storage": "storage (`tiers.storage.paths` and `capacity`)",
}
_CHOICES = {
    "host": "`policy`, `train.gradient_dtype` or `activations.offload`",
    "device": "`policy.parameters`",
    "storage": "`policy`, `activations.offload`, `checkpoint` or `tiers.storage.durability`",
}
"""What decides how much of a tier is needed, beside the model."""


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
    rhythm: Rhythm = field(default_factory=Rhythm)
    """After what its steps begin, and what they read more then."""
    link: LinkTraffic | None = None
    """None on the unified `cpu` device."""
    policy: dict[str, str]
    endurance_bytes: int | None = None
    """What each drive may be written in its life, where that is given."""
    num_paths: int = 1
    warnings: tuple[str, ...] = ()
    """What makes the run less safe than it could be."""
    activations: dict[str, str] = field(default_factory=dict)
    """What becomes of activations."""
    choices: Choices | None = None
    """The run's policy."""
    savings: tuple[Saving, ...] = ()
    """What to give up for less of a tier that the run does not fit."""
    smallest_anew_bytes: int | None = None
    """The smallest host budget without the store that is gone on with, where the run does not fit.
    """
    drains: bool = False
    """Whether checkpoints are copied elsewhere."""
    co_resident_units: int = 1
    """Most units that one call needs at once."""
    tiled: frozenset[str] = frozenset()
    """Units of one weight each that no slot holds: they are computed in pieces."""
    without_gradient: frozenset[str] = frozenset()
    """Names of trainable parameters that no step updates."""
    handed_over: frozenset[str] = frozenset()
    """Subgroups that go from their update into the slot in which the next forward uses them."""
    kept: frozenset[str] = frozenset()
    """Names of the units that a backward finds in their slots, or does not ask for."""
    carried: str | None = None
    """Name of the unit that forwards after a step's first find in its slot; None: there is none."""
    element_units: tuple[bool, ...] = ()
    """Of each unit, whether it is a layer: an element of a module list."""
    gradient_dtype: str = "parameter"
    prediction: Prediction = field(default_factory=Prediction)
    """What a step will take; empty where that was not asked for."""
    commits: CommitForecast | None = None
    """None where there are none."""
    machine: Machine | None = None
    """The rates that it was predicted with."""
    alternatives: tuple[Alternative, ...] = ()
    """Policies that were compared, the run's own first; none where times are not predicted."""
    adoption: Adoption | None = None
    """What was chosen for keys of `policy` that were `"auto"`; None where none was."""
    memory: UsableMemory | None = None
    """What this machine has; None where that does not matter."""
    device_memory_bytes: int = 0
    """Of the device tier, where that lies in this process's memory: of an emulated device."""
    is_bounded: bool = True
    """Whether host memory has a budget; else the run takes what it needs."""
    profile: PathProfile | None = None
    """What `offload bench io --tune` measured on the path, where it did."""

    @property
    def reasons(self) -> list[str]:
        """Why the run does not fit; empty if it does."""
        found = [] if self.host is None else _reasons(self.host)
        found.extend([] if self.device is None else _reasons(self.device))
        if self.storage is not None:
            found.extend(self.storage.reasons(path=self.storage_path))
        return [*found, *self._memory_reasons()]

    def _memory_reasons(self) -> list[str]:
        if self.memory is None or (self.host is not None and not self.host.fits):
            return []  # what would be taken is not known
        host = self.host
        try:
            self.memory.require(
                self._host_bytes,
                smallest_bytes=self._host_bytes if host is None else host.smallest_bytes,
                is_bounded=host is not None and self.is_bounded,
                device_bytes=self.device_memory_bytes,
            )
        except PlanError as error:
            return [str(error)]
        return []

    @property
    def held_bytes(self) -> int:
        """Bytes of arenas that lie in this process's memory, once each was in use."""
        return self._host_bytes + self.device_memory_bytes

    @property
    def _host_bytes(self) -> int:
        return self.in_memory_bytes if self.host is None else self.host.planned_bytes

    @property
    def fits(self) -> bool:
        return not self.reasons

    def require_fit(self) -> None:
        """Raises PlanError with every reason, and what would help, if the run does not fit."""
        if self.fits:
            return
        savings = [
            f"`{each.change}` needs {format_size(each.smallest_bytes)} of {each.tier}, "
            f"as {each.why}"
            for each in self.savings
        ]
        note = self._give_up_note()
        raise PlanError("; ".join([*self.reasons, *savings, *([note] if note else [])]))

    @property
    def smallest_bytes(self) -> dict[str, int | None]:
        """The smallest budget of each tier with which the run fits it; None where it has none."""
        return {
            "host": self.host.smallest_bytes if self.host else None,
            "device": self.device.smallest_bytes if self.device else None,
            "storage": self.storage.planned_bytes if self.storage else None,
        }

    @property
    def budget_bytes(self) -> dict[str, int]:
        """What there is of each tier; 0 of one that is not budgeted."""
        return {
            "host": self.host.budget_bytes if self.host else 0,
            "device": (self.device.budget_bytes if self.device else 0) or 0,
            "storage": self.storage.budget_bytes if self.storage else 0,
        }

    @property
    def short_tiers(self) -> list[str]:
        """The tiers that are too small for the run."""
        storage = self.storage
        fits = {
            "host": self.host is None or self.host.fits,
            "device": self.device is None or self.device.fits,
            "storage": storage is None or storage.planned_bytes <= storage.budget_bytes,
        }
        return [tier for tier, is_enough in fits.items() if not is_enough]

    def _give_up_note(self) -> str | None:
        """Says what else decides how much is needed of a tier that is too small."""
        notes, helped = [], {saving.tier for saving in self.savings}
        anew = self._begun_anew_note()
        if anew is not None:
            notes.append(anew)
        for tier in self.short_tiers:
            if tier not in helped:
                other = "a run that begins anew, " if tier == "host" and anew else ""
                notes.append(
                    f"no other choice of {_CHOICES[tier]} needs less of {_BUDGETS[tier]}: only "
                    f"more of it, {other}or a smaller model, helps"
                )
        return "; ".join(notes) or None

    def _begun_anew_note(self) -> str | None:
        host, anew_bytes = self.host, self.smallest_anew_bytes
        if host is None or anew_bytes is None or anew_bytes >= host.smallest_bytes:
            return None
        return (
            "the store keeps the layout that it was begun with, with records of "
            f"{format_size(host.buffer_bytes)}: a run that begins anew, with another "
            f"`--run-dir` and without `--resume`, needs {format_size(anew_bytes)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of `offload plan`; what does not apply or is not known is None."""
        host, storage, device = self.host, self.storage, self.device
        smallest = self.smallest_bytes
        return {
            "fits": self.fits,
            "reasons": self.reasons,
            "smallest": {
                "host_memory": smallest["host"],
                "device_memory": smallest["device"],
                "storage": smallest["storage"],
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
            "give_up": [asdict(saving) for saving in self.savings],
            "give_up_note": self._give_up_note(),
            "policy": self.policy,
            "activations": self.activations,
            "alternatives": [each.to_json() for each in self.alternatives],
            "adopted": self.adoption.to_json() if self.adoption else None,
            "suggested": self._suggestion(),
            "choices": [asdict(choice) for choice in self._explained()],
            "co_resident": self._co_resident(),
            "in_pieces": [piece.to_json() for piece in self._pieces()],
            "not_covered": [each.to_json() for each in self._not_covered()],
            "warnings": list(self.warnings),
            "drive_steps": self._drive_steps(),
            "parameters": self.layout.num_parameters,
            "state_bytes": ModelBytes.of(self.layout).state_bytes,
            "predicted": self._predicted(),
            "link": self.link.to_json() if self.link else None,
            "commits": self._commits(),
            "machine": self._machine(),
        }

    @property
    def suggested(self) -> Alternative | None:
        """The compared policy that is worth a change; None where the run's own is best."""
        if not self.alternatives:
            return None
        best = fastest(self.alternatives[0], self.alternatives[1:])
        return None if best is self.alternatives[0] else best

    def _suggestion(self) -> dict[str, Any] | None:
        suggested = self.suggested
        if suggested is None:
            return None
        own = self.alternatives[0]
        changes = suggested.choices.changed_from(own.choices)
        settings = ", ".join(f"policy.{key}={value}" for key, value in changes.items())
        return {
            "policy": changes,
            "step_s": suggested.step_s,
            "why": f"{settings}: a step would take {suggested.step_s:.3g} s instead of "
            f"{own.step_s:.3g} s",
        }

    def _commits(self) -> dict[str, float | int | None] | None:
        if self.commits is None or not self.fits:  # what does not fit makes none
            return None
        step = self.prediction.step
        return self.commits.to_json(step_s=step.step_s if step else None)

    def _machine(self) -> dict[str, Any] | None:
        if self.machine is not None:
            return self.machine.to_json()
        return None if self.profile is None else {"paths": [asdict(self.profile)]}

    @property
    def in_memory_bytes(self) -> int:
        """Parameters, gradients and state, were they all in memory."""
        gradients = keep_gradients(self.layout, self.gradient_dtype).resident_bytes
        return self.layout.parameter_bytes + self.layout.state_bytes + gradients

    def _predicted(self) -> dict[str, float | int | None]:
        found = self.prediction
        step = found.step
        return {
            "step_s": step.step_s if step else None,
            "forward_s": step.forward_s if step else None,
            "backward_s": step.backward_s if step else None,
            "update_s": step.update_s if step else None,
            "exposed_io_s": step.exposed_io_s if step else None,
            "bound_s": found.bound_s,
            "read_bytes_per_step": self.traffic.read_bytes + self.rhythm.mean_more_bytes(),
            "write_bytes_per_step": self.traffic.write_bytes,
            "rss_peak_bytes": found.rss_peak_bytes,
            "written_bytes_per_day": found.written_bytes_per_day,
            "tokens_to_hide_io": found.tokens_to_hide_io,
        }

    def _explained(self) -> Sequence[Choice]:
        if self.choices is None:
            return ()
        chosen = explain(self.layout, self.host, self.traffic, self.choices)
        return (*self._adopted(), *chosen)

    def _adopted(self) -> Iterator[Choice]:
        if self.adoption is not None:
            values = ", ".join(f"{key} {value}" for key, value in self.adoption.values.items())
            yield Choice(choice="policy", value=values, why=self.adoption.why)

    def _co_resident(self) -> dict[str, int]:
        """The largest set of units that one call needs at once."""
        tile = [slot_bytes_of(self.layout, self.tiled)] if self.tiled else []
        whole = [u.num_bytes for u in self.layout.units if u.name not in self.tiled]
        sizes = sorted(tile + whole, reverse=True)
        count = min(self.co_resident_units, len(sizes))
        return {"units": count, "num_bytes": sum(sizes[:count])}

    def _pieces(self) -> Sequence[Pieces]:
        slot_bytes = slot_bytes_of(self.layout, self.tiled)
        return [Pieces.of(u, slot_bytes) for u in self.layout.units if u.name in self.tiled]

    def _not_covered(self) -> Sequence[Uncovered]:
        return not_covered(
            self.layout,
            tiled=self.tiled,
            activation_bytes=self.prediction.activation_bytes,
            drains=self.drains,
            record_bytes=max((record.padded_bytes for record in self.layout.records), default=0),
        )

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
