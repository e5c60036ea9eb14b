"""Plans a run from its configuration, before anything is loaded or written."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from offload.config import Config
from offload.devices.opening import is_process_memory
from offload.layout import ModelLayout
from offload.memory import usable_memory
from offload.plan.host import HostPlan
from offload.plan.lost_work import CommitForecast, committed_bytes, measured_on_all
from offload.plan.machine_profile import MachineProfile, PathProfile, read_profile
from offload.plan.prediction import Choices
from offload.plan.run_plan import RunPlan
from offload.plan.traffic import ModelBytes
from offload.plan.usable_memory import UsableMemory
from offload.plan.window import too_small_window, window_bytes_for
from offload.policy import resolve_striping
from offload.runs.loss_contract import require_contract
from offload.runs.planned_steps import PlannedSteps, commit_intervals, has_device_memory
from offload.runs.planned_storage import (
    existing_directories,
    plan_storage,
    require_writable_paths,
    storage_warnings,
)
from offload.runs.planned_units import arrange_run
from offload.runs.rehearsal import RehearsedModel
from offload.runs.savings import possible_savings
from offload.sizes import parse_duration


def plan_run(
    config: Config,
    *,
    stores: Sequence[Path] = (),
    profile: MachineProfile | None = None,
    model: RehearsedModel | None = None,
    stored: ModelLayout | None = None,
) -> RunPlan:
    """Returns whether the run fits, and what it will need and move. Writes nothing.

    Args:
        config: Of the run.
        stores: Where the store goes on each path; none: a new run directory under the current one.
        profile: Of this machine; None reads its own.
        model: The run's, which several plans of it share; None: it is built now.
        stored: The layout of the store that is gone on with; None: what suits the budget.

    Raises:
        ConfigError: The model can't be built or gives no loss, the storage path is missing or not
            writable, or the striping is one for other paths.
    """
    require_writable_paths(config, stores)
    directories = existing_directories(config, stores)
    if config.offload:
        resolve_striping(config.policy.striping, num_paths=len(directories))  # or refuses it
    known = read_profile() if profile is None else profile
    window = config.tiers.host.window
    config = _with_window(config, directories, known)
    model = RehearsedModel.of(config) if model is None else model
    require_contract(config.model.factory, model)
    arrangement = arrange_run(config, model.module, stored=stored)
    discovered, layout = arrangement.discovered, arrangement.layout
    host = arrangement.host if config.offload else None
    steps = PlannedSteps.of(config, model, arrangement)
    spilled, memory = model.spilled_bytes(config), usable_memory()
    plan = RunPlan(
        layout=layout,
        host=host,
        storage=None
        if host is None
        else plan_storage(config, layout, host, stores, spill_bytes=spilled or 0),
        device=arrangement.device if has_device_memory(config) else None,
        activations=_activations(config),
        storage_path=", ".join(map(str, directories)),
        traffic=steps.traffic(),
        without_gradient=steps.without_gradient,
        rhythm=steps.rhythm(),
        link=steps.link(),
        handed_over=steps.handed_over,
        kept=steps.kept,
        carried=steps.carried,
        policy=_policy(config),
        profile=known.find(directories[0]) if config.offload else None,
        endurance_bytes=config.tiers.storage.endurance,
        num_paths=max(1, len(config.tiers.storage.paths)),
        warnings=()
        if host is None
        else (
            *storage_warnings(config, directories, spilled),
            *_memory_warnings(config, host, memory, window=window),
        ),
        memory=memory,
        device_memory_bytes=arrangement.device.planned_bytes
        if is_process_memory(config.tiers.device.kind)
        else 0,
        is_bounded=config.tiers.host.memory is not None,
        commits=_forecast_commits(
            config, steps.model_bytes, host, _path_profiles(config, directories, known)
        ),
        choices=choices_of(config),
        drains=config.checkpoint.drain is not None,
        co_resident_units=discovered.co_resident_units,
        element_units=tuple(unit.is_element for unit in discovered.units),
        gradient_dtype=config.train.gradient_dtype,
        tiled=discovered.wide_names,
    )
    return plan if plan.fits else _with_help(plan, config, model, stored=stored, stores=stores)


def _with_help(
    plan: RunPlan,
    config: Config,
    model: RehearsedModel,
    *,
    stored: ModelLayout | None,
    stores: Sequence[Path],
) -> RunPlan:
    """Returns the plan of a run that does not fit with what would need less."""
    asks_anew = stored is not None and "host" in plan.short_tiers
    return replace(
        plan,
        savings=tuple(possible_savings(config, model, plan, stored=stored, stores=stores)),
        smallest_anew_bytes=arrange_run(config, model.module).host.smallest_bytes
        if asks_anew
        else None,
    )


def _memory_warnings(
    config: Config, host: HostPlan, memory: UsableMemory, *, window: int | None
) -> Iterator[str]:
    """Yields what is wrong with the sizes that the run gives; `window` is the one asked for."""
    found = (
        too_small_window(window, host.buffer_bytes),
        memory.warning(config.tiers.host.memory, host.planned_bytes),
    )
    yield from (warning for warning in found if warning is not None)


def _activations(config: Config) -> dict[str, str]:
    return {
        "checkpoint": config.activations.checkpoint,
        "offload": config.activations.offload if config.offload else "none",
    }


def _with_window(config: Config, directories: Sequence[Path], profile: MachineProfile) -> Config:
    host, tiers = config.tiers.host, config.tiers
    window_bytes = window_bytes_for(host.window, directories, profile)
    host = host.model_copy(update={"window": window_bytes})
    return config.model_copy(update={"tiers": tiers.model_copy(update={"host": host})})


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


def _path_profiles(
    config: Config, directories: Sequence[Path], profile: MachineProfile
) -> list[PathProfile | None]:
    """Returns what is known of each path, no faster than the run lets it be."""
    limits = config.tiers.storage.rate_limits_of(len(directories))
    found = [profile.find(directory) for directory in directories]
    return [path and path.held_to(limit) for path, limit in zip(found, limits, strict=True)]


def _forecast_commits(
    config: Config,
    model: ModelBytes,
    host: HostPlan | None,
    profiles: Sequence[PathProfile | None],
) -> CommitForecast | None:
    tier = config.tiers.storage
    if host is None or tier.durability == "none":
        return None
    return CommitForecast(
        commit_bytes=committed_bytes(model, host),
        resident_bytes=host.resident_parameter_bytes + host.resident_state_bytes,
        paths=measured_on_all(profiles),
        intervals=commit_intervals(config),
        mean_time_between_failures_s=parse_duration(config.checkpoint.mean_time_between_failures),
    )


def _policy(config: Config) -> dict[str, str]:
    values = config.policy.model_dump(mode="json")
    return {key: str(value) for key, value in values.items()}
