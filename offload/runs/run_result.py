"""Makes the result of a run from its plan and what it did."""

from collections.abc import Sequence

from offload.config import Config
from offload.plan.lost_work import LostWork, shortest_interval_s
from offload.plan.machine import Machine
from offload.plan.run_plan import RunPlan
from offload.plan.traffic import ModelBytes, cached_state_bytes, is_in_turns
from offload.plan.wear import wear
from offload.runs.gpt import logits_workspace_bytes
from offload.runs.metrics import StepMetrics
from offload.runs.model import gpt_shape
from offload.runs.planned_steps import commit_intervals
from offload.runs.planning import choices_of
from offload.runs.result import StepMedians, TrainResult, measured_steps, ratio
from offload.runs.run_directory import RunDirectory
from offload.runs.training_run import RunSummary
from offload.sizes import parse_duration


def run_result(
    config: Config,
    *,
    directory: RunDirectory,
    plan: RunPlan,
    machine: Machine | None,
    rate_factor: float | None,
    summary: RunSummary,
) -> TrainResult:
    """Returns what a run reports at its end.

    Args:
        config: Of the run.
        directory: Where it is.
        plan: Of the run.
        machine: The rates that its steps are judged by; None where no bound applies.
        rate_factor: How much faster than probed the paths were taken to be.
        summary: What this process did.
    """
    recorder, stats = summary.recorder, summary.stats
    in_turns = is_in_turns(config.policy.order)
    rhythm, measured = plan.rhythm, measured_steps(recorder.steps)
    medians = StepMedians.of(
        recorder.rated(machine),
        recorder.bounds(machine),
        in_turns=in_turns,
        kind_of=None if rhythm.is_even else rhythm.before,
    )
    beside_mean = _state_beside_mean(config, plan, measured)
    more_read = rhythm.mean_more_bytes([step.step for step in measured])
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
        formula_read_bytes_per_step=plan.traffic.read_bytes + beside_mean + more_read,
        formula_write_bytes_per_step=plan.traffic.write_bytes + beside_mean,
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
        update_achieved_over_bound=ratio(medians.update_bound_s, medians.update_s)
        if choices_of(config).overlap == "none"
        else None,
        prefetch_hit_rate=recorder.prefetch_hit_rate,
        tokens_per_s=medians.tokens_per_s,
        others_cpu_share=summary.others_cpu_share,
        torch_threads=summary.torch_threads,
        stalls=[stall.to_json() for stall in stats.stalls],
        **_upkeep(config, plan, medians=medians, summary=summary),  # type: ignore[arg-type]
    )


def _state_beside_mean(config: Config, plan: RunPlan, steps: Sequence[StepMetrics]) -> int:
    """Returns the state that `steps` move each way beyond the mean of odd and even ones."""
    host = plan.host
    if host is None or config.optimizer_tier != "storage" or not steps:
        return 0
    order, without = config.policy.order, plan.without_gradient
    found, mean = (
        cached_state_bytes(
            plan.layout, order, host.num_cached, steps=numbers, without_gradient=without
        )
        for numbers in ([step.step for step in steps], (1, 2))
    )
    return mean - found


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
        interval_s = shortest_interval_s(commit_intervals(config), step_s)
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


def _logits_bytes(config: Config) -> int:
    """The workspace of logits and loss, which is known for built-in models only."""
    if config.model.factory is not None:
        return 0
    return logits_workspace_bytes(
        gpt_shape(config.model), batch=config.train.batch, length=config.model.context
    )
