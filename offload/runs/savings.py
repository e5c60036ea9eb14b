"""What could be given up so that a run fits a tier that is too small for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from offload.config import Config
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
        values={"activations.offload": "none"},
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
        values={"activations.offload": "none"},
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

    Args:
        config: Of the run.
        model: Of the run.
        plan: Of the run as it is.
        stored: The layout of the store that is gone on with.
        stores: Where the store goes on each path.
    """
    for change in _CHANGES:
        values = {key: value for key, value in change.values.items() if _at(config, key) != value}
        if change.tier not in plan.short_tiers or not values:
            continue
        changed = config
        for key, value in values.items():
            changed = _with(changed, key, value)
        arranged = arrange_run(changed, model.module, stored=stored)
        spilled = model.spilled_bytes(changed) or 0
        smaller_bytes = _smallest_bytes(changed, arranged, change.tier, stores, spilled)
        if smaller_bytes < (plan.smallest_bytes[change.tier] or 0):
            settings = (f"{key} = {_written(value)}" for key, value in values.items())
            yield Saving(
                change=", ".join(settings),
                tier=change.tier,
                smallest_bytes=smaller_bytes,
                why=change.why,
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
