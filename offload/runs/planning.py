"""Plans a run from its configuration, before anything is loaded or written."""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from offload.config import Config
from offload.errors import ConfigError, PlanError
from offload.layout import RECORD_ELEMENTS, ModelLayout, build_layout
from offload.plan.activations import plan_activations
from offload.plan.device import DevicePlan, plan_device
from offload.plan.explanation import Saving
from offload.plan.gradients import may_spill
from offload.plan.handover import handed_over, handed_over_bytes, records_under_forward
from offload.plan.host import HostPlan, plan_host
from offload.plan.link import LinkTraffic, link_traffic
from offload.plan.lost_work import CommitForecast, committed_bytes, measured_on_all
from offload.plan.machine_profile import MachineProfile, PathProfile, read_profile
from offload.plan.prediction import Choices
from offload.plan.record_size import choose_records
from offload.plan.run_plan import RunPlan
from offload.plan.storage import StoragePath, StoragePlan, store_space, usable_bytes
from offload.plan.tiles import choose_wide
from offload.plan.traffic import (
    ModelBytes,
    StepTraffic,
    kept_for_backward_bytes,
    step_traffic,
)
from offload.plan.window import WINDOW_BYTES, window_bytes_for
from offload.policy import resolve_order
from offload.runs.model import build_meta_model
from offload.runs.spilled import spilled_bytes
from offload.sizes import MIB, parse_duration
from offload.storage.drain_target import existing_directory, shared_path
from offload.streaming.discovery import DiscoveredModel, discover_units, whole_matrices
from offload.streaming.unit_modules import UnitRules
from offload.streaming.wide import wide_candidates

BLOCK_BYTES = MIB
"""The block size of stores."""


def plan_run(
    config: Config,
    *,
    stores: Sequence[Path] = (),
    profile: MachineProfile | None = None,
    model: nn.Module | None = None,
    record_elements: int | None = None,
) -> RunPlan:
    """Returns whether the run fits, and what it will need and move. Writes nothing.

    Args:
        config: Of the run.
        stores: Where the store goes on each path; none: a new run directory under the current one.
        profile: Of this machine; None reads its own.
        model: The run's, without values; None: it is built now.
        record_elements: Of the store that is gone on with; None: what suits the budget.

    Raises:
        ConfigError: The model can't be built or the storage path is missing or not writable.
    """
    _require_writable_paths(config, stores)
    directories = existing_directories(config, stores)
    known = read_profile() if profile is None else profile
    config = _with_window(config, directories, known)
    arranged = _arrange(
        config,
        build_meta_model(config.model) if model is None else model,
        record_elements=record_elements,
    )
    discovered, layout, host = arranged.discovered, arranged.layout, arranged.host
    handed = _handed_over(config, layout, discovered, host)
    spilled = spilled_bytes(config)
    return RunPlan(
        layout=layout,
        host=host,
        storage=_plan_storage(config, layout, host, stores, spilled or 0)
        if host is not None
        else None,
        device=_plan_device(config, layout, discovered),
        activations={
            "checkpoint": config.activations.checkpoint,
            "offload": config.activations.offload if config.offload else "none",
        },
        storage_path=", ".join(map(str, directories)),
        traffic=plan_traffic(
            config,
            layout,
            host,
            kept=_kept_bytes(config, layout, discovered, host),
            handed_over=handed,
        ),
        link=_plan_link(config, layout, _kept_bytes(config, layout, discovered, host)),
        handed_over=handed,
        policy=_policy(config),
        profile=known.find(directories[0]) if config.offload else None,
        endurance_bytes=config.tiers.storage.endurance,
        num_paths=max(1, len(config.tiers.storage.paths)),
        warnings=tuple(_warnings(config, directories, spilled)) if config.offload else (),
        commits=_forecast_commits(config, layout, host, [known.find(d) for d in directories]),
        choices=choices_of(config),
        savings=tuple(_savings(config, layout, discovered, host)),
        drains=config.checkpoint.drain is not None,
        co_resident_units=discovered.co_resident_units,
        element_units=tuple(unit.is_element for unit in discovered.units),
        gradient_dtype=config.train.gradient_dtype,
        tiled=discovered.wide_names,
    )


def _with_window(config: Config, directories: Sequence[Path], profile: MachineProfile) -> Config:
    host, tiers = config.tiers.host, config.tiers
    window_bytes = window_bytes_for(host.window, directories, profile)
    host = host.model_copy(update={"window": window_bytes})
    return config.model_copy(update={"tiers": tiers.model_copy(update={"host": host})})


@dataclass(frozen=True, slots=True)
class _Arranged:
    """A model in units, laid out and planned; without a host plan where all is in memory."""

    discovered: DiscoveredModel
    layout: ModelLayout
    host: HostPlan | None


def _arrange(config: Config, model: nn.Module, *, record_elements: int | None) -> _Arranged:
    """Returns the run's model as `wrap` would have it: with the same wide weights and records.

    Raises:
        PlanError: There is no budget to plan with.
    """

    def arrange_with(wide: frozenset[str]) -> _Arranged:
        discovered = discover_units(model, UnitRules.of(config.units), wide=wide)

        def layout_with(elements: int) -> ModelLayout:
            return build_layout(
                [unit.facts for unit in discovered.units],
                codec=config.optimizer.codec,
                record_elements=elements,
                rule=config.optimizer.rule,
                whole=whole_matrices(discovered, config.optimizer.whole_patterns),
            )

        def plan_with(elements: int) -> tuple[ModelLayout, HostPlan]:
            layout = layout_with(elements)
            return layout, _plan_host(config, layout, discovered)

        if not config.offload:
            return _Arranged(discovered, layout_with(RECORD_ELEMENTS), None)
        if record_elements is None:
            return _Arranged(discovered, *choose_records(plan_with))
        return _Arranged(discovered, *plan_with(record_elements))

    def plans(wide: frozenset[str]) -> list[HostPlan | DevicePlan]:
        tried = arrange_with(wide)
        device = _plan_device(config, tried.layout, tried.discovered)
        return [plan for plan in (tried.host, device) if plan is not None]

    plain = arrange_with(frozenset())
    tier, is_unified = config.parameter_tier, config.tiers.device.kind == "cpu"
    if tier == "device" or (tier == "host" and is_unified):  # all of it is where it is used
        return plain
    whole = whole_matrices(plain.discovered, config.optimizer.whole_patterns)
    wide = choose_wide(wide_candidates(model, besides=whole), plans)
    return arrange_with(wide) if wide else plain


def tokens_per_step(config: Config) -> int:
    """Returns the tokens of one optimizer step."""
    return config.train.batch * config.train.micro_steps * config.model.context


def choices_of(config: Config) -> Choices:
    """Returns the run's policy; without offloading everything is in memory."""
    policy = config.policy
    return Choices(
        parameters=config.parameter_tier,
        optimizer=config.optimizer_tier,
        order=policy.order,
        overlap=policy.overlap if config.offload else "none",
        striping=policy.striping,
        prefetch=policy.prefetch,
    )


def plan_traffic(
    config: Config,
    layout: ModelLayout,
    host: HostPlan | None,
    *,
    kept: int = 0,
    handed_over: Collection[str] = (),
) -> StepTraffic:
    """Returns the bytes that a step moves under the config's policy.

    Args:
        config: Of the run.
        layout: Of the model.
        host: How the host budget is cut; None where everything is in memory.
        kept: Parameter bytes that a backward does not read.
        handed_over: Names of the subgroups that the first forward does not read.
    """
    return step_traffic(
        ModelBytes.of(layout),
        parameters=config.parameter_tier,
        optimizer=config.optimizer_tier,
        micro_steps=config.train.micro_steps,
        cached_state_bytes=_cached_bytes(config, layout, host),
        kept_forward_bytes=[handed_over_bytes(layout, handed_over)],
        kept_backward_bytes=[kept] * config.train.micro_steps,
        spilled_gradient_bytes=host.gradients.spilled_bytes if host else 0,
    )


def _kept_bytes(
    config: Config, layout: ModelLayout, discovered: DiscoveredModel, host: HostPlan | None
) -> int:
    """Returns the bytes of units that stay for backward, or that backward does not ask for."""
    num_free = _num_free_slots(config, layout, discovered, host)
    tiled = discovered.wide_names
    whole = [i for i, unit in enumerate(layout.units) if unit.name not in tiled]
    kept = set(whole[-num_free:] if num_free else ())
    not_asked_for = (i for i in discovered.lookup_units() if i not in kept)
    return kept_for_backward_bytes(layout, num_free, tiled=tiled) + sum(
        discovered.units[index].num_bytes for index in not_asked_for
    )


def _handed_over(
    config: Config, layout: ModelLayout, discovered: DiscoveredModel, host: HostPlan | None
) -> frozenset[str]:
    """Returns the subgroups that go from their update into a slot."""
    policy = config.policy
    if host is None or policy.parameters != "storage":
        return frozenset()
    return handed_over(
        layout,
        # Where the device has memory of its own they come through the slots in the host's.
        min(_num_free_slots(config, layout, discovered, host), host.num_slots),
        records=records_under_forward(layout, policy.order, policy.overlap, host.num_cached),
        tiled=discovered.wide_names,
        is_finished_at_once=config.tiers.storage.commit_every == 1,
    )


def _num_free_slots(
    config: Config, layout: ModelLayout, discovered: DiscoveredModel, host: HostPlan | None
) -> int:
    """Returns how many slots there are beside those that enclosing calls hold."""
    device = _plan_device(config, layout, discovered)
    num_slots = 0 if host is None else host.num_slots
    if device is not None:
        num_slots = device.num_slots
    return max(num_slots - (discovered.co_resident_units - 1), 0)


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
    directories = existing_directories(config, stores)
    writable = [d.is_dir() and os.access(d, os.W_OK | os.X_OK) for d in directories]
    for index, directory in enumerate(directories):
        # A store that is gone on with leaves out what cannot be written any more.
        is_part_of_store = bool(stores) and directory == stores[index] and any(writable)
        if not writable[index] and not is_part_of_store:
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
        parameters=config.parameter_tier,
        optimizer=config.optimizer_tier,
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
        tiled=discovered.wide_names,
        window_bytes=config.tiers.host.window or WINDOW_BYTES,
        spills_gradients=may_spill(
            config.policy.parameters, config.policy.optimizer, overlap=config.policy.overlap
        ),
    )


def _savings(
    config: Config, layout: ModelLayout, discovered: DiscoveredModel, host: HostPlan | None
) -> Iterator[Saving]:
    """Yields changes with which a smaller host budget would do, where the run does not fit."""
    if host is None or host.fits:
        return
    policy, train = config.policy, config.train
    changes = {
        "policy.parameters": (policy, "parameters", "storage", "passes then wait for fetches"),
        "policy.optimizer": (policy, "optimizer", "storage", "updates then move the state"),
        "train.gradient_dtype": (
            train,
            "gradient_dtype",
            "parameter",
            "gradients then accumulate in the parameters' own precision",
        ),
    }
    for key, (section, name, value, why) in changes.items():
        if getattr(section, name) == value:
            continue
        changed = section.model_copy(update={name: value})
        plan = _plan_host(
            config.model_copy(update={key.partition(".")[0]: changed}), layout, discovered
        )
        if plan.smallest_bytes < host.smallest_bytes:
            yield Saving(
                change=f'{key} = "{value}"', smallest_host_bytes=plan.smallest_bytes, why=why
            )


def _plan_device(
    config: Config, layout: ModelLayout, discovered: DiscoveredModel
) -> DevicePlan | None:
    if config.tiers.device.kind == "cpu" or not config.offload:
        return None
    return plan_device(
        layout,
        budget_bytes=config.tiers.device.memory,
        parameters=config.parameter_tier,
        co_resident_units=discovered.co_resident_units,
        prefetch_distance=config.policy.prefetch,
        tiled=discovered.wide_names,
    )


def _plan_link(config: Config, layout: ModelLayout, kept: int) -> LinkTraffic | None:
    if config.tiers.device.kind == "cpu":
        return None
    return link_traffic(
        layout,
        parameters=config.parameter_tier,
        gradient_dtype=config.train.gradient_dtype,
        micro_steps=config.train.micro_steps,
        kept_backward_bytes=kept,
    )


def _plan_storage(
    config: Config,
    layout: ModelLayout,
    host: HostPlan,
    stores: Sequence[Path],
    spill_bytes: int,
) -> StoragePlan:
    tier = config.tiers.storage
    paths = []
    for index, directory in enumerate(existing_directories(config, stores)):
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
            is_staged=config.policy.overlap in ("backward", "both"),
            spill_bytes=spill_bytes + host.gradients.space_bytes,
        ),
        free_bytes=usable_bytes([replace(path, capacity_bytes=None) for path in paths]),
        capacity_bytes=usable_bytes(paths) if tier.capacity else None,
    )


def _warnings(config: Config, directories: Sequence[Path], spilled: int | None) -> Iterator[str]:
    tier, drain = config.tiers.storage, config.checkpoint.drain
    if spilled is None:
        yield (
            "the storage planned does not hold activations, whose bytes can't be told for this "
            "model before it runs; leave room for them in `tiers.storage.capacity`"
        )
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


def existing_directories(config: Config, stores: Sequence[Path]) -> list[Path]:
    """Returns the nearest directory above each part of the store that is already there."""
    wanted = list(stores) or [Path(path) for path in config.tiers.storage.paths] or [Path.cwd()]
    return [existing_directory(directory) for directory in wanted]


def _bytes_below(store: Path | None) -> int:
    """Bytes that a store which is gone on with takes already."""
    if store is None or not store.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in store.rglob("*") if path.is_file())


def _policy(config: Config) -> dict[str, str]:
    values = config.policy.model_dump(mode="json")
    return {key: str(value) for key, value in values.items()}
