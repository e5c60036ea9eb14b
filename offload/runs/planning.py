"""Plans a run from its configuration, before anything is loaded or written."""

import os
import shutil
from pathlib import Path
from typing import Literal, cast

from offload.config import Config
from offload.errors import ConfigError, PlanError
from offload.layout import ModelLayout, build_layout
from offload.plan.host import HostPlan, plan_host
from offload.plan.machine_profile import MachineProfile, read_profile
from offload.plan.run_plan import RunPlan
from offload.plan.storage import StoragePlan, store_bytes
from offload.plan.traffic import ModelBytes, StepTraffic, step_traffic
from offload.policy import resolve_order
from offload.runs.model import build_meta_model
from offload.sizes import MIB
from offload.streaming.discovery import DiscoveredModel, discover_units, whole_matrices

BLOCK_BYTES = MIB
"""The block size of stores."""


def plan_run(
    config: Config, *, store: Path | None = None, profile: MachineProfile | None = None
) -> RunPlan:
    """Returns whether the run fits, and what it will need and move. Writes nothing.

    Args:
        config: Of the run.
        store: Where the store goes; None for a new run directory under the current one.
        profile: Of this machine; None reads its own.

    Raises:
        ConfigError: The model can't be built or the storage path is missing or not writable.
    """
    _require_writable_path(config, store)
    discovered = discover_units(build_meta_model(config.model))
    layout = build_layout(
        [unit.facts for unit in discovered.units],
        codec=config.optimizer.codec,
        rule=config.optimizer.rule,
        whole=whole_matrices(discovered, config.optimizer.whole_patterns),
    )
    host = _plan_host(config, layout, discovered) if config.offload else None
    directory = _existing_directory(config, store)
    known = read_profile() if profile is None else profile
    return RunPlan(
        layout=layout,
        host=host,
        storage=_plan_storage(config, layout, host, store) if host is not None else None,
        storage_path=str(directory),
        traffic=plan_traffic(config, layout, host),
        policy=_policy(config),
        profile=known.find(directory) if config.offload else None,
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


def _cached_bytes(config: Config, layout: ModelLayout, host: HostPlan | None) -> int:
    """H: bytes of the records that an update finds in memory, those that the last step kept."""
    if host is None:
        return 0
    records = layout.records
    kept = resolve_order(config.policy.order).kept(len(records), host.num_cached, step=1)
    return sum(records[index].num_bytes for index in kept)


def _require_writable_path(config: Config, store: Path | None) -> None:
    for path in config.tiers.storage.paths:
        if not Path(path).is_dir():
            raise ConfigError(
                f"cannot use `tiers.storage.paths` entry `{path}`: expected a directory, found "
                f"{'a file' if Path(path).exists() else 'nothing'}; make it or correct the path"
            )
    directory = _existing_directory(config, store)
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
    )


def _plan_storage(
    config: Config, layout: ModelLayout, host: HostPlan, store: Path | None
) -> StoragePlan:
    tier = config.tiers.storage
    free_bytes = shutil.disk_usage(_existing_directory(config, store)).free
    return StoragePlan(
        planned_bytes=store_bytes(
            layout,
            block_bytes=BLOCK_BYTES,
            durability=tier.durability,
            window_bytes=host.buffer_bytes * host.num_buffers,
        ),
        free_bytes=free_bytes + _bytes_below(store),
        capacity_bytes=tier.capacity,
    )


def _existing_directory(config: Config, store: Path | None) -> Path:
    """The nearest directory above the store that is already there."""
    paths = config.tiers.storage.paths
    directory = store or (Path(paths[0]) if paths else Path.cwd())
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


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
