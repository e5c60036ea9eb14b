"""Predicts a planned run, measuring in seconds what the machine's profile lacks."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from offload.config import Config
from offload.devices.opening import require_device
from offload.errors import ConfigError
from offload.layout import ModelLayout
from offload.plan.alternatives import Adoption, Alternative
from offload.plan.machine_profile import (
    MachineProfile,
    default_file,
    read_profile,
)
from offload.plan.run_plan import RunPlan
from offload.runs.compared_policies import compare_policies, with_choices
from offload.runs.measurement import Measurement, OnMeasure
from offload.runs.planned_storage import existing_directories
from offload.runs.planning import plan_run
from offload.runs.profile_file import add_to_profile
from offload.runs.rehearsal import RehearsedModel


def plan_and_predict(
    config: Config,
    *,
    stores: Sequence[Path] = (),
    stored: ModelLayout | None = None,
    machine_file: Path | None = None,
    open_keys: Collection[str] = (),
    on_measure: OnMeasure = lambda _: None,
    model: RehearsedModel | None = None,
) -> RunPlan:
    """Returns the plan of a run with what a step will take. Leaves nothing on the paths.

    It is the plan of the run as it would be trained: what is `"auto"` is chosen here. What another
    choice of the keys that the user left open would take is in `alternatives`, and the one worth it
    in `suggested`.

    What the profile lacks is measured now; what was measured of memory, kernels and passes is added
    to a profile that exists.

    Args:
        config: Of the run.
        stores: Where the store goes on each path; none: below the current directory.
        stored: The layout of the store that is gone on with.
        machine_file: The profile; None: the default one, which may be missing.
        open_keys: Of `policy`: those that the user has not set.
        on_measure: Called before each measurement.
        model: The run's, which several plans of it share; None: it is built now.

    Raises:
        ConfigError: As from `plan_run`.
    """
    auto, config = config.policy.auto, config.settled()
    profile = read_profile(machine_file)
    model = RehearsedModel.of(config) if model is None else model

    def plan_of(config: Config) -> RunPlan:
        return plan_run(config, stores=stores, profile=profile, model=model, stored=stored)

    plan = plan_of(config)
    if not plan.fits:
        return plan  # nothing is measured for a run that can't be
    try:
        require_device(config.tiers.device.kind)
    except ConfigError as error:  # memory and bytes are the run's, wherever it is planned
        missing = f"{error}; a plan of it needs no device, but its times are not predicted here"
        return replace(plan, warnings=(*plan.warnings, missing))
    measure = Measurement(config, plan, existing_directories(config, stores), profile, on_measure)
    measure.take()
    _keep(measure, machine_file or default_file())
    compared = _Compared(plan_of, measure, own=plan)
    adopted = compared.under(config, auto) if auto else ()
    adoption = Adoption.of(auto, adopted) if adopted else None
    if adoption is not None:
        config = with_choices(config, adoption.chosen.choices)
    elif config.offload and auto:
        measure.warnings.append(
            "`auto` in `policy` is the default preset's value here: times are not predicted"
        )
    others = compared.under(config, open_keys)
    plan = plan_of(config)
    return replace(
        plan,
        machine=measure.machine,
        prediction=measure.whole_prediction(config, plan),
        warnings=(*plan.warnings, *measure.warnings),
        alternatives=(*others, *(each for each in adopted if each not in others)),
        adoption=adoption,
    )


def _keep(measure: Measurement, file: Path | None) -> None:
    """Adds what was measured to a profile that exists, or says why that can't be."""
    if file is None or not file.exists() or measure.found == MachineProfile():
        return
    try:
        add_to_profile(file, measure.found)
    except ConfigError as error:  # a run needs what was measured, not the file
        measure.warnings.append(f"what was measured is not kept for the next plan: {error}")


class _Compared:
    """Compares policies of one run by what was measured for it."""

    def __init__(
        self, plan_of: Callable[[Config], RunPlan], measure: Measurement, *, own: RunPlan
    ) -> None:
        self._plan_of = plan_of
        self._measure = measure
        self._own = own

    def under(self, config: Config, keys: Collection[str]) -> tuple[Alternative, ...]:
        """Returns the policy of `config`, and those that differ in `keys`.

        None where all is in memory, or without times.
        """
        if not config.offload:
            return ()
        now_s = self._step_s(config)
        if now_s is None:
            return ()
        return tuple(compare_policies(config, keys, now_s=now_s, step_s=self._step_s))

    def _step_s(self, config: Config) -> float | None:
        plan = self._plan_of(config)
        is_as_exact = plan.fits and plan.tiled <= self._own.tiled
        found = self._measure.prediction_of(config, plan).step if is_as_exact else None
        return found.step_s if found else None
