"""What could be given up so that a run fits a tier that is too small for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from offload.config import Config
from offload.config.schema import ActivationsConfig
from offload.errors import ConfigError
from offload.layout import ModelLayout
from offload.plan.explanation import Saving
from offload.plan.run_plan import RunPlan
from offload.runs.planned_storage import plan_storage
from offload.runs.planned_units import arrange_run
from offload.runs.rehearsal import RehearsedModel
from offload.streaming.arrangement import Arrangement


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Values of keys with which a run takes less of a tier, and what that costs."""

    tier: str
    values: Mapping[str, str | int]
    why: str


_STAYING: Mapping[str, str | int] = {
    "activations.offload": "none",
    # Refused where nothing moves.
    **{
        f"activations.{key}": ActivationsConfig.model_fields[key].default
        for key in ("memory", "threshold")
    },
}
_CHANGES = (
    _Change(
        tier="host", values={"policy.parameters": "storage"}, why="passes then wait for fetches"
    ),
    _Change(tier="host", values={"policy.optimizer": "storage"}, why="updates then move the state"),
    _Change(
        tier="host",
        values={"policy.overlap": "none"},
        why="gradients may then go to storage where memory is too short",
    ),
    _Change(
        tier="host",
        values={"train.gradient_dtype": "parameter"},
        why="gradients then accumulate in the parameters' own precision",
    ),
    _Change(
        tier="host",
        values=_STAYING,
        why="activations then stay where they are; a smaller `activations.memory` helps too",
    ),
    _Change(tier="device", values={"policy.parameters": "host"}, why="passes then wait for copies"),
    _Change(
        tier="storage",
        values={"policy.overlap": "none"},
        why="no step then has new versions beside the current ones until it ends",
    ),
    _Change(
        tier="storage",
        values={"optimizer.codec": "split"},
        why="a master then shares its upper half with the parameter, with the same results",
    ),
    _Change(
        tier="storage",
        values=_STAYING,
        why="activations then stay where they are",
    ),
    _Change(
        tier="storage",
        values={"checkpoint.save_every": 0},
        why="no checkpoint then keeps a version",
    ),
    _Change(
        tier="storage",
        values={
            "tiers.storage.durability": "none",
            "tiers.storage.commit_every": 0,
            "checkpoint.save_every": 0,
        },
        why="nothing is then committed, and the state ends with the run",
    ),
)


def possible_savings(
    config: Config,
    model: RehearsedModel,
    plan: RunPlan,
    *,
    stored: ModelLayout | None,
    stores: Sequence[Path],
) -> Iterator[Saving]:
    """Yields changes with which less would do of the tiers that are too small.

    Each by itself, and, where none of them is enough, those of a tier that help together.

    Args:
        config: Of the run.
        model: Of the run.
        plan: Of the run as it is.
        stored: The layout of the store that is gone on with.
        stores: Where the store goes on each path.
    """

    def smallest_bytes(config: Config, tier: str) -> int | None:
        try:
            arranged = arrange_run(config, model.module, stored=stored)
        except ConfigError:  # a combination that is refused saves nothing
            return None
        spilled = model.spilled_bytes(config) or 0
        return _smallest_bytes(config, arranged, tier, stores, spilled)

    for tier in plan.short_tiers:
        begun = _Changed(config=config, smallest_bytes=plan.smallest_bytes[tier] or 0)
        changes = [change for change in _CHANGES if change.tier == tier]
        singles = [each for c in changes if (each := begun.with_change(c, smallest_bytes))]
        yield from (single.saving(tier) for single in singles)
        together = begun
        for change in changes:
            together = together.with_change(change, smallest_bytes) or together
        least_bytes = min((single.smallest_bytes for single in singles), default=0)
        if together.smallest_bytes < least_bytes > plan.budget_bytes[tier]:
            yield together.saving(tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """A run with some changes, and how much it needs of the tier that they are for."""

    config: Config
    smallest_bytes: int
    values: Mapping[str, str | int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def with_change(
        self, change: _Change, smallest_bytes: Callable[[Config, str], int | None]
    ) -> "_Changed | None":
        """Returns it with one more; None where that needs no less."""
        values = {k: value for k, value in change.values.items() if _at(self.config, k) != value}
        changed = self.config
        for key, value in values.items():
            changed = _with(changed, key, value)
        smaller_bytes = smallest_bytes(changed, change.tier) if values else None
        if smaller_bytes is None or smaller_bytes >= self.smallest_bytes:
            return None
        return _Changed(
            config=changed,
            smallest_bytes=smaller_bytes,
            values={**self.values, **values},
            reasons=(*self.reasons, change.why),
        )

    def saving(self, tier: str) -> Saving:
        settings = (f"{key} = {_written(value)}" for key, value in self.values.items())
        return Saving(
            change=", ".join(settings),
            tier=tier,
            smallest_bytes=self.smallest_bytes,
            why=", and ".join(self.reasons),
        )


def _smallest_bytes(
    config: Config, arranged: Arrangement, tier: str, stores: Sequence[Path], spilled: int
) -> int:
    if tier == "storage":
        storage = plan_storage(config, arranged.layout, arranged.host, stores, spilled)
        return storage.planned_bytes
    return arranged.device.smallest_bytes if tier == "device" else arranged.host.smallest_bytes


def _at(config: Config, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _with(config: Config, key: str, value: object) -> Config:
    *parents, name = key.split(".")
    sections: list[BaseModel] = [config]
    for parent in parents:
        sections.append(getattr(sections[-1], parent))
    for section, changed in zip(reversed(sections), reversed([*parents, name]), strict=True):
        value = section.model_copy(update={changed: value})
    assert isinstance(value, Config)
    return value


def _written(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
