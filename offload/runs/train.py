"""Trains as a configuration says: checks, plan, probe, then the run itself."""

import gc
import logging
from pathlib import Path

from offload.config import Config
from offload.devices.opening import require_device
from offload.errors import ConfigError, StorageError
from offload.layout import ModelLayout
from offload.memory import trim_heap
from offload.optim.kernels import load_kernels
from offload.plan.lost_work import LostWork
from offload.plan.machine import Machine
from offload.plan.run_plan import RunPlan
from offload.plan.traffic import ModelBytes
from offload.plan.wear import wear
from offload.runs.adoption import OnNotice, settle_policy
from offload.runs.commits import committed_step, stored_layout
from offload.runs.compatibility import require_compatible
from offload.runs.data import Text, open_text
from offload.runs.gpt import logits_workspace_bytes
from offload.runs.model import gpt_shape
from offload.runs.planned_storage import BLOCK_BYTES
from offload.runs.planning import plan_run
from offload.runs.probe import ProbeSize, probe_machine
from offload.runs.refinement import refine_profile
from offload.runs.restore import copy_in
from offload.runs.result import StepMedians, TrainResult, ratio
from offload.runs.run_directory import CONFIG_FILE, Resume, RunDirectory, resolve_run_directory
from offload.runs.training_run import Progress, RunSummary, TrainingRun
from offload.runs.warm_up import warm_up
from offload.sizes import parse_duration
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings

_LOG = logging.getLogger("offload.runs")


def run_training(
    config: Config,
    *,
    run_dir: str | Path | None = None,
    resume: Resume = None,
    progress: Progress | None = None,
    on_notice: OnNotice = lambda _: None,
    validates: bool = True,
) -> TrainResult:
    """Trains as `config` says and returns what was reached.

    Args:
        config: Of the run; with `offload = false` everything stays in memory.
        run_dir: A new directory, or an existing one with `resume`; None makes one.
        resume: `auto`, or the directory of a run with a complete commit.
        progress: Called with the metrics of each step when its line is written.
        on_notice: Told in a line what is measured for, and chosen in, a policy with `"auto"`.
        validates: False leaves validation out before the first and after the last step.

    Raises:
        ConfigError: The config, a path or the data is wrong; nothing was written.
        PlanError: The run does not fit; nothing was written.
    """
    require_device(config.tiers.device.kind)
    directory = resolve_run_directory(config, run_dir=run_dir, resume=resume)
    if directory.is_resumed and directory.copied_from is None:
        _require_resumable(config, directory)
    stored = _stored_layout(directory)
    config = settle_policy(config, directory, stored=stored, on_notice=on_notice)
    plan = plan_run(config, stores=directory.stores, stored=stored)
    plan.require_fit()
    text = _open_text(config)
    warm_up(config)
    directory.prepare(config, plan=plan.to_json())
    for warning in plan.warnings:
        _LOG.warning("%s", warning)
    if directory.copied_from is not None:
        copy_in(config, directory)
    machine = _probe(config, plan, directory) if config.offload else None
    summary = TrainingRun(
        config=config,
        directory=directory,
        plan=plan,
        machine=machine,
        text=text,
        progress=progress,
        validates=validates,
    ).execute()
    rate_factor = None
    if machine is not None:
        machine = _probe_again(machine, config, plan, directory)
        machine, rate_factor = summary.recorder.raised(machine)
    result = _result(
        config,
        directory=directory,
        plan=plan,
        machine=machine,
        rate_factor=rate_factor,
        summary=summary,
    )
    directory.write_result(result.to_json(), has_steps=summary.done >= summary.first_step)
    refine_profile(
        config,
        plan,
        summary,
        machine=machine,
        directories=[store.parent for store in directory.stores],
        activation_bytes=result.activation_peak_bytes,
    )
    return result


def _require_resumable(config: Config, directory: RunDirectory) -> None:
    if not config.offload:
        raise ConfigError(
            f"cannot resume the run in `{directory.path}` with `offload = false`: expected "
            "`offload = true`, as only an offloaded run has a store; leave it out"
        )
    require_compatible(config, previous=directory.path / CONFIG_FILE)
    done = committed_step(directory.stores)
    if done is not None and done > config.train.steps:
        raise ConfigError(
            f"nothing to do for the run in `{directory.path}`: expected `train.steps` of {done} or "
            f"more, as {done} steps are done and committed, found {config.train.steps}; raise "
            "`train.steps` to go on"
        )


def _stored_layout(directory: RunDirectory) -> ModelLayout | None:
    """Returns how a store that is gone on with is laid out; None where there is none."""
    if not directory.is_resumed:
        return None
    copied = directory.copied_from
    return stored_layout(directory.stores if copied is None else [copied])


def _open_text(config: Config) -> Text:
    text = open_text(
        config.data.source,
        files=config.data.files,
        validation_fraction=config.data.validation_fraction,
    )
    text.check(context=config.model.context)
    return text


def _probe(config: Config, plan: RunPlan, directory: RunDirectory) -> Machine:
    assert plan.host is not None  # as is the next: this run is offloaded
    assert plan.storage is not None
    roots = [store.parent for store in directory.stores]
    settings = [each for root in roots for each in measured_settings(root)]
    with Engine(block_bytes=BLOCK_BYTES, paths=settings) as engine:
        machine = probe_machine(
            roots,
            engine=engine,
            kernels=load_kernels(),
            codec=config.optimizer.codec,
            rule=config.optimizer.rule,
            dtype=plan.layout.usual_dtype,
            size=ProbeSize.within(
                host_bytes=plan.host.budget_bytes, storage_bytes=plan.storage.planned_bytes
            ),
        )
    return machine.held_to(config.tiers.storage.rate_limits_of(len(roots)))


def _probe_again(
    machine: Machine, config: Config, plan: RunPlan, directory: RunDirectory
) -> Machine:
    """Returns the better of each rate then and now: a path's rates drift while a run goes on."""
    gc.collect()  # the session's arena goes before the probe takes memory of its own
    trim_heap()
    try:
        return machine.best_of(_probe(config, plan, directory))
    except StorageError as error:  # the run is done and committed: its result must not be lost
        _LOG.warning("the rates of the path could not be measured again: %s", error)
        return machine


def _result(
    config: Config,
    *,
    directory: RunDirectory,
    plan: RunPlan,
    machine: Machine | None,
    rate_factor: float | None,
    summary: RunSummary,
) -> TrainResult:
    recorder, stats = summary.recorder, summary.stats
    medians = StepMedians.of(recorder.rated(machine), recorder.bounds(machine))
    losses = [step.loss for step in recorder.steps]
    return TrainResult(
        run_dir=str(directory.path),
        store=str(directory.store) if config.offload else None,
        steps=summary.done,
        first_step=summary.first_step,
        stopped_by=summary.stopped_by,
        skipped_steps=sum(step.skipped for step in recorder.steps),
        loss=losses[-1] if losses else None,
        losses=losses,
        validation_loss_before=summary.loss_before,
        validation_loss_after=summary.loss_after,
        state_digest=summary.digest,
        parameters=plan.layout.num_parameters,
        state_bytes=ModelBytes.of(plan.layout).state_bytes,
        host_budget_bytes=config.tiers.host.memory if config.offload else None,
        host_peak_bytes=stats.host_peak_bytes if config.offload else None,
        device_budget_bytes=config.tiers.device.memory,
        device_peak_bytes=stats.device_peak_bytes,
        rss_baseline_bytes=summary.rss_baseline_bytes,
        rss_peak_bytes=summary.rss_peak_bytes,
        activation_peak_bytes=summary.activation_bytes + _logits_bytes(config),
        activation_offload_bytes_per_step=medians.activation_offload_bytes,
        activation_hit_rate=ratio(
            stats.activation_hits, stats.activation_hits + stats.activation_misses
        ),
        commit_bytes=stats.commit_bytes,
        read_bytes_per_step=medians.read_bytes,
        write_bytes_per_step=medians.write_bytes,
        formula_read_bytes_per_step=plan.traffic.read_bytes,
        formula_write_bytes_per_step=plan.traffic.write_bytes,
        step_s=medians.step_s,
        forward_s=medians.forward_s,
        backward_s=medians.backward_s,
        update_s=medians.update_s,
        other_s=medians.other_s,
        io_wait_s=medians.io_wait_s,
        bound_s=medians.bound_s,
        achieved_over_bound=ratio(medians.bound_s, medians.step_s),
        path_rate_factor=rate_factor,
        update_bound_s=medians.update_bound_s,
        update_achieved_over_bound=ratio(medians.update_bound_s, medians.update_s),
        prefetch_hit_rate=recorder.prefetch_hit_rate,
        tokens_per_s=medians.tokens_per_s,
        others_cpu_share=summary.others_cpu_share,
        stalls=[stall.to_json() for stall in stats.stalls],
        **_upkeep(config, plan, medians=medians, summary=summary),  # type: ignore[arg-type]
    )


def _upkeep(
    config: Config, plan: RunPlan, *, medians: StepMedians, summary: RunSummary
) -> dict[str, float | int | None]:
    """Returns the figures of commits, failures and wear; None where one does not apply."""
    storage, step_s = config.tiers.storage, medians.step_s
    commit_s = summary.commit_s
    figures: dict[str, float | int | None] = {
        "commit_s": commit_s,
        "recovery_s": summary.recovery_s,
        "expected_lost_work_s": None,
        "best_commit_interval_s": None,
        "best_commit_every": None,
    }
    if commit_s is not None:
        lost = LostWork(
            commit_s=commit_s,
            recovery_s=summary.recovery_s,
            mean_time_between_failures_s=parse_duration(
                config.checkpoint.mean_time_between_failures
            ),
        )
        interval_s = _interval_s(storage.commit_every, step_s)
        best_s = lost.best_interval_s
        figures["expected_lost_work_s"] = lost.expected_s(interval_s) if interval_s else None
        figures["best_commit_interval_s"] = best_s
        figures["best_commit_every"] = max(1, round(best_s / step_s)) if step_s else None
    stored = [step.store_bytes for step in summary.recorder.steps if step.store_bytes]
    figures["store_planned_bytes"] = plan.storage.planned_bytes if plan.storage else None
    figures["store_peak_bytes"] = max(stored, default=None)
    num_steps = max(len(summary.recorder.steps), 1)
    worn = wear(
        bytes_per_step=(medians.write_bytes or 0) + summary.stats.commit_bytes // num_steps,
        step_s=step_s,
        endurance_bytes=storage.endurance,
        shares=summary.write_shares or (1.0,),
    )
    figures["written_bytes_per_day"] = worn.bytes_per_day if config.offload else None
    figures["drive_days"] = worn.drive_days if config.offload else None
    return figures


def _interval_s(every: int | str, step_s: float | None) -> float | None:
    if isinstance(every, str):
        return parse_duration(every)
    return every * step_s if every and step_s else None


def _logits_bytes(config: Config) -> int:
    """The workspace of logits and loss, which is known for built-in models only."""
    if config.model.factory is not None:
        return 0
    return logits_workspace_bytes(
        gpt_shape(config.model), batch=config.train.batch, length=config.model.context
    )
