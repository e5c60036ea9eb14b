"""Plans a run from its configuration, before anything is loaded or written."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from offload.config import Config
from offload.devices.opening import is_process_memory
from offload.layout import ModelLayout
from offload.memory import usable_memory
from offload.plan.gradients import spilled_bytes_of
from offload.plan.handover import handed_over, handed_over_bytes, records_under_forward
from offload.plan.host import HostPlan
from offload.plan.link import LinkTraffic, link_traffic
from offload.plan.lost_work import CommitForecast, committed_bytes, measured_on_all
from offload.plan.machine_profile import MachineProfile, PathProfile, read_profile
from offload.plan.prediction import Choices
from offload.plan.rhythm import Before, Rhythm
from offload.plan.run_plan import RunPlan
from offload.plan.traffic import (
    ModelBytes,
    StepTraffic,
    cached_state_bytes,
    step_traffic,
    updated_records,
)
from offload.plan.usable_memory import UsableMemory
from offload.plan.uses import Reads, Uses, reads_of
from offload.plan.window import too_small_window, window_bytes_for
from offload.runs.loss_contract import require_contract
from offload.runs.planned_storage import (
    existing_directories,
    plan_storage,
    require_writable_paths,
    storage_warnings,
)
from offload.runs.planned_units import arrange_run
from offload.runs.rehearsal import RehearsedModel, uses_by_modules
from offload.runs.savings import possible_savings
from offload.sizes import parse_duration
from offload.streaming.arrangement import Arrangement


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
        ConfigError: The model can't be built or gives no loss, or the storage path is missing or
            not writable.
    """
    require_writable_paths(config, stores)
    directories = existing_directories(config, stores)
    known = read_profile() if profile is None else profile
    window = config.tiers.host.window
    config = _with_window(config, directories, known)
    model = RehearsedModel.of(config) if model is None else model
    require_contract(config.model.factory, model)
    arrangement = arrange_run(config, model.module, stored=stored)
    discovered, layout = arrangement.discovered, arrangement.layout
    host = arrangement.host if config.offload else None
    uses = _uses(config, model, arrangement)
    reads = reads_of(uses, _num_slots(config, arrangement), tiled=discovered.wide)
    without = _without_gradient(config, model, arrangement)
    usual = _usually_before(config)
    handed = _handed_over(config, arrangement, uses, before=usual, without_gradient=without)
    spilled, memory = model.spilled_bytes(config), usable_memory()
    plan = RunPlan(
        layout=layout,
        host=host,
        storage=None
        if host is None
        else plan_storage(config, layout, host, stores, spill_bytes=spilled or 0),
        device=arrangement.device if _has_device_memory(config) else None,
        activations=_activations(config),
        storage_path=", ".join(map(str, directories)),
        traffic=plan_traffic(
            config, layout, host, reads=reads, handed_over=handed, without_gradient=without
        ),
        without_gradient=without,
        rhythm=_rhythm(config, arrangement, uses, usual=usual, without_gradient=without),
        link=_plan_link(config, layout, reads=reads),
        handed_over=handed,
        kept=frozenset(u.name for i, u in enumerate(layout.units) if not reads.backward[i]),
        carried=None if reads.carried is None else layout.units[reads.carried].name,
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
        commits=_forecast_commits(config, layout, host, _path_profiles(config, directories, known)),
        choices=choices_of(config),
        drains=config.checkpoint.drain is not None,
        co_resident_units=discovered.co_resident_units,
        element_units=tuple(unit.is_element for unit in discovered.units),
        gradient_dtype=config.train.gradient_dtype,
        tiled=discovered.wide_names,
    )
    if plan.fits:
        return plan
    return replace(
        plan,
        savings=tuple(possible_savings(config, model, plan, stored=stored, stores=stores)),
        smallest_anew_bytes=None
        if stored is None or "host" not in plan.short_tiers
        else arrange_run(config, model.module).host.smallest_bytes,
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


def commit_intervals(config: Config) -> tuple[float | int, ...]:
    """Returns those of commits and of checkpoints: seconds, or steps where it is an `int`."""
    every = (config.tiers.storage.commit_every, config.checkpoint.save_every)
    return tuple(parse_duration(each) if isinstance(each, str) else each for each in every)


def plan_traffic(
    config: Config,
    layout: ModelLayout,
    host: HostPlan | None,
    *,
    reads: Reads,
    handed_over: Collection[str] = (),
    without_gradient: Collection[str] = (),
) -> StepTraffic:
    """Returns the bytes that a step moves under the config's policy.

    Args:
        config: Of the run.
        layout: Of the model.
        host: How the host budget is cut; None where everything is in memory.
        reads: How often the passes of a micro-step read each unit.
        handed_over: Names of the subgroups that the first forward does not read.
        without_gradient: Names of parameters that get none.
    """
    first = reads.kept_forward_bytes(layout) + handed_over_bytes(layout, handed_over)
    later = [reads.kept_forward_bytes(layout, is_first=False)] * (config.train.micro_steps - 1)
    return step_traffic(
        ModelBytes.of(layout, without_gradient=without_gradient),
        parameters=config.parameter_tier,
        optimizer=config.optimizer_tier,
        micro_steps=config.train.micro_steps,
        cached_state_bytes=0
        if host is None
        else cached_state_bytes(
            layout, config.policy.order, host.num_cached, without_gradient=without_gradient
        ),
        kept_forward_bytes=[first, *later],
        kept_backward_bytes=[reads.kept_backward_bytes(layout)] * config.train.micro_steps,
        spilled_gradient_bytes=spilled_bytes_of(layout, host.gradients, without_gradient)
        if host
        else 0,
    )


def _has_device_memory(config: Config) -> bool:
    return config.offload and config.tiers.device.kind != "cpu"


def _uses(config: Config, model: RehearsedModel, arrangement: Arrangement) -> Uses:
    """Returns which units a micro-step uses, in order."""
    if config.policy.parameters == "storage" or _has_device_memory(config):
        return model.uses(arrangement.discovered)
    # Passes read nothing: a rehearsal would take a second for a large model.
    return uses_by_modules(model.module, arrangement.discovered)


def _without_gradient(
    config: Config, model: RehearsedModel, arrangement: Arrangement
) -> frozenset[str]:
    """Returns the names of trainable parameters that get no gradient; models of ours have none."""
    if config.model.factory is None or "storage" not in (
        config.parameter_tier,
        config.optimizer_tier,
    ):
        return frozenset()
    return model.without_gradient(arrangement.discovered)


def _usually_before(config: Config) -> Before:
    """Returns what every step begins after."""
    if config.train.eval_every == 1:
        return "validation"
    is_each = 1 in (config.tiers.storage.commit_every, config.checkpoint.save_every)
    return "commit" if is_each else "step"


def _rhythm(
    config: Config,
    arrangement: Arrangement,
    uses: Uses,
    *,
    usual: Before,
    without_gradient: Collection[str],
) -> Rhythm:
    """Returns what happens between the run's steps; what goes by the clock is not foreseen."""
    rhythm = Rhythm(
        validation=config.train.eval_every,
        commits=tuple(every for every in commit_intervals(config) if isinstance(every, int)),
    )

    def handed_bytes(before: Before) -> int:
        names = _handed_over(
            config, arrangement, uses, before=before, without_gradient=without_gradient
        )
        return handed_over_bytes(arrangement.layout, names)

    kinds = rhythm.kinds
    more = {kind: handed_bytes(usual) - handed_bytes(kind) for kind in kinds if len(kinds) > 1}
    return replace(rhythm, more_read_bytes=more)


def _handed_over(
    config: Config,
    arrangement: Arrangement,
    uses: Uses,
    *,
    before: Before,
    without_gradient: Collection[str],
) -> frozenset[str]:
    """Returns the subgroups that go from their update into a slot, in a step after `before`."""
    policy, host, layout = config.policy, arrangement.host, arrangement.layout
    if not config.offload or policy.parameters != "storage":
        return frozenset()
    if before == "validation":  # its forward takes them
        return frozenset()
    updated = {record.name for record in updated_records(layout, without_gradient)}
    under_forward = records_under_forward(layout, policy.order, policy.overlap, host.num_cached)
    return handed_over(
        layout,
        # Where the device has memory of its own they come through the slots in the host's.
        min(_num_slots(config, arrangement), host.num_slots),
        records=under_forward & updated,
        uses=uses,
        tiled=arrangement.discovered.wide_names,
        is_finished_at_once=before == "commit",
    )


def _num_slots(config: Config, arrangement: Arrangement) -> int:
    """Returns how many slots the units of the run have where it computes."""
    slots = arrangement.device if _has_device_memory(config) else arrangement.host
    return slots.num_slots if config.offload else 0


def _path_profiles(
    config: Config, directories: Sequence[Path], profile: MachineProfile
) -> list[PathProfile | None]:
    """Returns what is known of each path, no faster than the run lets it be."""
    limits = config.tiers.storage.rate_limits_of(len(directories))
    found = [profile.find(directory) for directory in directories]
    return [path and path.held_to(limit) for path, limit in zip(found, limits, strict=True)]


def _forecast_commits(
    config: Config,
    layout: ModelLayout,
    host: HostPlan | None,
    profiles: Sequence[PathProfile | None],
) -> CommitForecast | None:
    tier = config.tiers.storage
    if host is None or tier.durability == "none":
        return None
    return CommitForecast(
        commit_bytes=committed_bytes(ModelBytes.of(layout), host),
        resident_bytes=host.resident_parameter_bytes + host.resident_state_bytes,
        paths=measured_on_all(profiles),
        intervals=commit_intervals(config),
        mean_time_between_failures_s=parse_duration(config.checkpoint.mean_time_between_failures),
    )


def _plan_link(config: Config, layout: ModelLayout, *, reads: Reads) -> LinkTraffic | None:
    if config.tiers.device.kind == "cpu":
        return None
    return link_traffic(
        layout,
        parameters=config.parameter_tier,
        gradient_dtype=config.train.gradient_dtype,
        micro_steps=config.train.micro_steps,
        kept_forward_bytes=reads.kept_forward_bytes(layout),
        kept_later_bytes=reads.kept_forward_bytes(layout, is_first=False),
        kept_backward_bytes=reads.kept_backward_bytes(layout),
        adds_on_device=config.tiers.device.kind == "cuda",
    )


def _policy(config: Config) -> dict[str, str]:
    values = config.policy.model_dump(mode="json")
    return {key: str(value) for key, value in values.items()}
