"""What a run takes for the keys of its policy that are `"auto"`."""

import logging
from collections.abc import Callable

from offload.config import Config, load_config
from offload.config.supported import unsupported_values
from offload.layout import ModelLayout
from offload.runs.planning import plan_run
from offload.runs.prediction import plan_and_predict
from offload.runs.rehearsal import RehearsedModel
from offload.runs.run_directory import CONFIG_FILE, RunDirectory

_LOG = logging.getLogger("offload.runs")

OnNotice = Callable[[str], None]
"""Told in a line what is measured, and what was chosen."""


def settle_policy(
    config: Config,
    directory: RunDirectory,
    *,
    stored: ModelLayout | None,
    on_notice: OnNotice,
    model: RehearsedModel,
) -> Config:
    """Returns the run with a value for every key of its policy.

    A run that goes on keeps what it had, if that fits: it was chosen by what was measured then.

    Args:
        config: Of the run.
        directory: Where it goes.
        stored: The layout of the store that is gone on with.
        on_notice: Told what is measured, and what was chosen.
        model: The run's.

    Raises:
        PlanError: The run does not fit.
    """
    auto, begun = config.policy.auto, config.settled()
    if not auto or not config.offload:
        return begun
    if directory.is_resumed and directory.copied_from is None:
        before = load_config(directory.path / CONFIG_FILE).settled().policy
        policy = config.policy.with_values(**{key: getattr(before, key) for key in auto})
        kept = config.model_copy(update={"policy": policy})
        if (
            not any(unsupported_values(kept))
            and plan_run(kept, stores=directory.stores, stored=stored, model=model).fits
        ):
            return kept
    plan = plan_and_predict(
        config,
        stores=directory.stores,
        stored=stored,
        on_measure=lambda what: on_notice(f"measuring {what}"),
        model=model,
    )
    plan.require_fit()
    if plan.adoption is None:
        known = plan_run(begun, stores=directory.stores, stored=stored, model=model).warnings
        for warning in plan.warnings:  # the others are said when the run begins
            if warning not in known:
                _LOG.warning("%s", warning)
        return begun
    settled = config.model_copy(update={"policy": begun.policy.with_values(**plan.adoption.values)})
    values = ", ".join(f"`policy.{key}` = `{v}`" for key, v in plan.adoption.values.items())
    _LOG.info("%s: %s", values, plan.adoption.why)
    on_notice(f"{values}: {plan.adoption.why}")
    return settled
