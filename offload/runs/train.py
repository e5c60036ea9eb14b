"""Trains as a configuration says: checks, plan, probe, then the run itself."""

import logging
from pathlib import Path

from offload.config import Config
from offload.devices.opening import require_device
from offload.errors import ConfigError
from offload.layout import ModelLayout
from offload.plan.run_plan import RunPlan
from offload.runs.adoption import OnNotice, settle_policy
from offload.runs.commits import committed_step, stored_layout
from offload.runs.compatibility import require_compatible
from offload.runs.data import Text, open_text
from offload.runs.planning import plan_run
from offload.runs.refinement import refine_profile
from offload.runs.rehearsal import RehearsedModel
from offload.runs.restore import copy_in
from offload.runs.result import TrainResult
from offload.runs.run_directory import CONFIG_FILE, Resume, RunDirectory, resolve_run_directory
from offload.runs.run_owner import owning
from offload.runs.run_rates import probe_run, probe_run_again
from offload.runs.run_result import run_result
from offload.runs.training_run import Progress, TrainingRun
from offload.runs.warm_up import warm_up
from offload.storage.ownership import RUN_OWNER_FILE, require_unowned

_LOG = logging.getLogger("offload.runs")


def run_training(
    config: Config,
    *,
    run_dir: str | Path | None = None,
    resume: Resume = None,
    progress: Progress | None = None,
    on_notice: OnNotice = lambda _: None,
    is_kept: bool = True,
) -> TrainResult:
    """Trains as `config` says and returns what was reached.

    Args:
        config: Of the run; with `offload = false` everything stays in memory.
        run_dir: A new directory, or an existing one with `resume`; None makes one.
        resume: `auto`, or the directory of a run with a complete commit.
        progress: Called with the metrics of each step when its line is written.
        on_notice: Told in a line what is measured for, and chosen in, a policy with `"auto"`.
        is_kept: False for a measurement of steps, whose directory is removed again: without
            validation before the first and after the last step, without `metrics.jsonl`, and
            nothing that is said refers to the directory.

    Raises:
        ConfigError: The config, a path or the data is wrong; nothing was written.
        PlanError: The run does not fit; nothing was written.
        StoreError: Another process has the run open; nothing was written.
    """
    require_device(config.tiers.device.kind)
    directory = resolve_run_directory(config, run_dir=run_dir, resume=resume)
    require_unowned(directory.path, file=RUN_OWNER_FILE)
    if directory.is_resumed and directory.copied_from is None:
        _require_resumable(config, directory)
    _require_unowned(directory)
    config, plan = _settle(config, directory, on_notice=on_notice)
    text = _open_text(config)
    warm_up(config)
    is_named = run_dir is not None or resume is not None
    with owning(config, directory, is_named=is_named, resume=resume) as directory:
        _require_unowned(directory)  # another may have taken a store while this run was planned
        directory.prepare(config, plan=plan.to_json())
        for warning in plan.warnings:
            _LOG.warning("%s", warning)
        if directory.copied_from is not None:
            copy_in(config, directory)
        return _carry_out(
            config,
            directory=directory,
            plan=plan,
            text=text,
            progress=progress,
            is_kept=is_kept,
        )


def _settle(
    config: Config, directory: RunDirectory, *, on_notice: OnNotice
) -> tuple[Config, RunPlan]:
    """Returns the run with a value for every key of its policy, and its plan, which fits."""
    stored, model = _stored_layout(directory), RehearsedModel.of(config)
    config = settle_policy(config, directory, stored=stored, on_notice=on_notice, model=model)
    plan = plan_run(config, stores=directory.stores, stored=stored, model=model)
    plan.require_fit()
    return config, plan


def _carry_out(
    config: Config,
    *,
    directory: RunDirectory,
    plan: RunPlan,
    text: Text,
    progress: Progress | None,
    is_kept: bool,
) -> TrainResult:
    """Trains in a directory that is prepared, and returns what was reached."""
    machine = probe_run(config, plan, directory) if config.offload else None
    summary = TrainingRun(
        config=config,
        directory=directory,
        plan=plan,
        machine=machine,
        text=text,
        progress=progress,
        is_kept=is_kept,
    ).execute()
    rate_factor = None
    if machine is not None:
        machine = probe_run_again(machine, config, plan, directory)
        machine, rate_factor = summary.recorder.raised(machine)
    result = run_result(
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


def _require_unowned(directory: RunDirectory) -> None:
    """Refuses a run that another process has open, whose files a start would write anew."""
    for store in directory.stores:
        require_unowned(store)


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
