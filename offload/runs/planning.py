"""Plans a run from its configuration, before anything is loaded or written."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from offload.config import Config
from offload.errors import ConfigError, PlanError
from offload.layout import ModelLayout, build_layout
from offload.plan.activations import plan_activations
from offload.plan.device import DevicePlan, plan_device
from offload.plan.host import HostPlan, plan_host
from offload.plan.lost_work import CommitForecast, committed_bytes, measured_on_all
from offload.plan.machine_profile import MachineProfile, PathProfile, read_profile
from offload.plan.run_plan import RunPlan
from offload.plan.storage import StoragePath, StoragePlan, store_space, usable_bytes
from offload.plan.traffic import ModelBytes, StepTraffic, step_traffic
from offload.policy import resolve_order
from offload.runs.gpt import logits_workspace_bytes
from offload.runs.model import build_meta_model, gpt_shape
from offload.sizes import MIB, parse_duration
from offload.storage.drain_target import existing_directory, shared_path
from offload.streaming.discovery import DiscoveredModel, discover_units, whole_matrices

BLOCK_BYTES = MIB
"""The block size of stores."""


def plan_run(
    config: Config, *, stores: Sequence[Path] = (), profile: MachineProfile | None = None
) -> RunPlan:
    """Returns whether the run fits, and what it will need and move. Writes nothing.

    Args:
        config: Of the run.
        stores: Where the store goes on each path; none: a new run directory under the current one.
        profile: Of this machine; None reads its own.

    Raises:
        ConfigError: The model can't be built or the storage path is missing or not writable.
    """
    _require_writable_paths(config, stores)
    discovered = discover_units(build_meta_model(config.model))
    layout = build_layout(
        [unit.facts for unit in discovered.units],
        codec=config.optimizer.codec,
        rule=config.optimizer.rule,
        whole=whole_matrices(discovered, config.optimizer.whole_patterns),
    )
    host = _plan_host(config, layout, discovered) if config.offload else None
    directories = _existing_directories(config, stores)
    known = read_profile() if profile is None else profile
    return RunPlan(
        layout=layout,
        host=host,
        storage=_plan_storage(config, layout, host, stores) if host is not None else None,
        device=_plan_device(config, layout, discovered),
        activations={
            "checkpoint": config.activations.checkpoint,
            "offload": config.activations.offload if config.offload else "none",
        },
        outside_budgets=_outside_budgets(config, layout),
        storage_path=", ".join(map(str, directories)),
        traffic=plan_traffic(config, layout, host),
        policy=_policy(config),
        profile=known.find(directories[0]) if config.offload else None,
        endurance_bytes=config.tiers.storage.endurance,
        num_paths=max(1, len(config.tiers.storage.paths)),
        warnings=tuple(_warnings(config, directories)) if config.offload else (),
        commits=_forecast_commits(config, layout, host, [known.find(d) for d in directories]),
    )


def plan_traffic(config: Config, layout: ModelLayout, host: HostPlan | None) -> StepTraffic:
    """Returns the bytes that a step moves under the config's policy.

    Args:
        config: Of the run.
        layout: Of the model.
        host: How the host budget is cut; None where everything is in memory.
    """
    return step_traffic(
        ModelBytes.of(layout),
        parameters=_placement(config.policy.parameters) if config.offload else "host",
        optimizer=_placement(config.policy.optimizer) if config.offload else "host",
        micro_steps=config.train.micro_steps,
        cached_state_bytes=_cached_bytes(config, layout, host),
    )


def _forecast_commits(
    config: Config,
    layout: ModelLayout,
    host: HostPlan | None,
    profiles: Sequence[PathProfile | None],
) -> CommitForecast | None:
    tier = config.tiers.storage
    if host is None or tier.durability == "none":
        return None
    every = tier.commit_every
    return CommitForecast(
        commit_bytes=committed_bytes(ModelBytes.of(layout), host),
        resident_bytes=host.resident_parameter_bytes + host.resident_state_bytes,
        paths=measured_on_all(profiles),
        interval=parse_duration(every) if isinstance(every, str) else every,
        mean_time_between_failures_s=parse_duration(config.checkpoint.mean_time_between_failures),
    )


def _cached_bytes(config: Config, layout: ModelLayout, host: HostPlan | None) -> int:
    """H: bytes of the records that an update finds in memory, those that the last step kept."""
    if host is None:
        return 0
    records = layout.records
    kept = resolve_order(config.policy.order).kept(len(records), host.num_cached, step=1)
    return sum(records[index].num_bytes for index in kept)


def _require_writable_paths(config: Config, stores: Sequence[Path]) -> None:
    for path in config.tiers.storage.paths:
        if not Path(path).is_dir():
            raise ConfigError(
                f"cannot use `tiers.storage.paths` entry `{path}`: expected a directory, found "
                f"{'a file' if Path(path).exists() else 'nothing'}; make it or correct the path"
            )
    for directory in _existing_directories(config, stores):
        if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"cannot store a run under `{directory}`: expected a writable directory, found one "
                "that is read-only or belongs to another user, or a file; choose another "
                "`--run-dir` or `tiers.storage.paths`"
            )


def _plan_host(config: Config, layout: ModelLayout, discovered: DiscoveredModel) -> HostPlan:
    budget_bytes = config.tiers.host.memory
    if budget_bytes is None:
        raise PlanError(
            "cannot plan the host tier: expected a budget in `tiers.host.memory`, found none; "
            "set it, or set `offload = false`"
        )
    return plan_host(
        layout,
        budget_bytes=budget_bytes,
        parameters=_placement(config.policy.parameters),
        optimizer=_placement(config.policy.optimizer),
        gradient_dtype=config.train.gradient_dtype,
        co_resident_units=discovered.co_resident_units,
        prefetch_distance=config.policy.prefetch,
        keeps_records=bool(resolve_order(config.policy.order).kept(1, 1, step=1)),
        is_unified=config.tiers.device.kind == "cpu",
        activations=plan_activations(
            config.activations.offload,
            memory_bytes=config.activations.memory,
            threshold_bytes=config.activations.threshold,
        ),
    )


def _plan_device(
    config: Config, layout: ModelLayout, discovered: DiscoveredModel
) -> DevicePlan | None:
    if config.tiers.device.kind == "cpu" or not config.offload:
        return None
    return plan_device(
        layout,
        budget_bytes=config.tiers.device.memory,
        co_resident_units=discovered.co_resident_units,
        prefetch_distance=config.policy.prefetch,
    )


def _plan_storage(
    config: Config, layout: ModelLayout, host: HostPlan, stores: Sequence[Path]
) -> StoragePlan:
    tier = config.tiers.storage
    paths = []
    for index, directory in enumerate(_existing_directories(config, stores)):
        usage = shutil.disk_usage(directory)
        path = StoragePath(
            device=directory.stat().st_dev,
            total_bytes=usage.total,
            free_bytes=usage.free,
            taken_bytes=_bytes_below(stores[index] if stores else None),
            capacity_bytes=tier.capacity_of(index),
        )
        paths.append(path)
    return StoragePlan(
        space=store_space(
            layout,
            block_bytes=BLOCK_BYTES,
            durability=tier.durability,
            num_buffers=host.num_written_at_once,
            num_checkpoints=num_kept_checkpoints(config),
        ),
        free_bytes=usable_bytes([replace(path, capacity_bytes=None) for path in paths]),
        capacity_bytes=usable_bytes(paths) if tier.capacity else None,
    )


def _outside_budgets(config: Config, layout: ModelLayout) -> dict[str, int | None]:
    """Returns what no budget covers, in bytes; None where it is not bounded."""
    model, itemsize = config.model, 4 if config.model.dtype == "float32" else 2
    shape = gpt_shape(model) if model.factory is None else None
    one_input = config.train.batch * model.context * model.width * itemsize
    moved = config.offload and config.activations.offload != "none"
    is_moved = moved and one_input >= config.activations.threshold
    return {
        "block_inputs": None if shape is None else 0 if is_moved else model.layers * one_input,
        "logits": None
        if shape is None
        else logits_workspace_bytes(shape, batch=config.train.batch, length=model.context),
        "gradients_on_their_way": max((unit.num_bytes for unit in layout.units), default=0),
        "activations_within_blocks": None,
        "library_workspaces": None,
    }


def _warnings(config: Config, directories: Sequence[Path]) -> Iterator[str]:
    tier, drain = config.tiers.storage, config.checkpoint.drain
    if tier.durability == "none":
        return
    if drain is None:
        yield (
            "no checkpoint is copied off the storage paths: a path that cannot be read any more "
            "ends the run for good; set `checkpoint.save_every` and `checkpoint.drain`"
        )
    elif (path := shared_path(Path(drain), directories)) is not None:
        yield (
            f"`checkpoint.drain` = `{drain}` lies on the file system of storage path `{path}`, "
            "with which it would be lost; name a directory on another drive or file system"
        )
    elif not config.checkpoint.save_every:
        yield "`checkpoint.drain` has no effect without `checkpoint.save_every`; set it"


def num_kept_checkpoints(config: Config) -> int:
    """Returns how many checkpoints a run keeps at most, as far as its steps say."""
    every, keep_last = config.checkpoint.save_every, config.checkpoint.keep_last
    if not every:
        return 0
    # How many a time interval gives is not known beforehand; one stands for each until then.
    made = config.train.steps // every if isinstance(every, int) else max(keep_last, 1)
    return min(made, keep_last) if keep_last else made


def _existing_directories(config: Config, stores: Sequence[Path]) -> list[Path]:
    """The nearest directory above each part of the store that is already there."""
    wanted = list(stores) or [Path(path) for path in config.tiers.storage.paths] or [Path.cwd()]
    return [existing_directory(directory) for directory in wanted]


def _bytes_below(store: Path | None) -> int:
    """Bytes that a store which is gone on with takes already."""
    if store is None or not store.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in store.rglob("*") if path.is_file())


def _placement(name: str) -> Literal["host", "storage"]:
    # Device arenas are host arenas on the unified `cpu` device.
    return cast(Literal["host", "storage"], "host" if name == "device" else name)


def _policy(config: Config) -> dict[str, str]:
    values = config.policy.model_dump(mode="json")
    return {key: str(value) for key, value in values.items()}
