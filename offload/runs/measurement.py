"""What a plan needs to know of a machine: from its profile, or measured in seconds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from offload._native.optim import copy_rate_bytes_per_s
from offload.config import Config
from offload.memory import trim_heap
from offload.optim.kernels import load_kernels
from offload.plan.machine import LinkRates, Machine, PathRates
from offload.plan.machine_profile import (
    KernelProfile,
    MachineProfile,
    MemoryProfile,
)
from offload.plan.prediction import Prediction, predict_step
from offload.plan.run_plan import RunPlan
from offload.plan.storage import BLOCK_BYTES
from offload.plan.tiles import slot_bytes_of
from offload.plan.work import ModelPasses
from offload.runs.busy import CpuTime, busy_note, others_cpu_share
from offload.runs.data import open_text
from offload.runs.link_rates import link_rates
from offload.runs.pass_finder import PassFinder
from offload.runs.planning import choices_of, tokens_per_step
from offload.runs.probe import ProbeSize, probe_path, probe_update
from offload.runs.rss import current_rss_bytes
from offload.runs.warm_up import warm_up
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings

_PATIENCE = 2.5
"""A plan has no steps that would correct what a short probe got wrong."""

OnMeasure = Callable[[str], None]
"""Told what is about to be measured."""


class Measurement:
    """What is known of a machine for one run, and what had to be measured for it."""

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        directories: Sequence[Path],
        profile: MachineProfile,
        on_measure: OnMeasure,
    ) -> None:
        self._config = config
        self._plan = plan
        self._directories = directories
        self._profile = profile
        self._on_measure = on_measure
        self._threads = torch.get_num_threads()
        self.found = MachineProfile()
        self.machine: Machine | None = None
        self._baseline_bytes = 0
        self._passes: ModelPasses | None = None
        self.warnings: list[str] = []

    def take(self) -> None:
        """Measures what the profile lacks."""
        # Another policy may store what this one keeps in memory.
        paths = self._paths() if self._config.offload else ()
        # After the paths, whose engine a run has too before it begins.
        self._baseline_bytes = self._held_before()
        began = CpuTime.now()
        self.machine = machine = Machine(
            paths=paths,
            copy_bytes_per_s=(copy_rate := self._copy_rate()),
            update_parameters_per_s=self._update_rate(),
            link=self._link(copy_rate),
        )
        finder = PassFinder(self._config, self._plan, self._profile, self._on_measure)
        self._passes = finder.find(
            copy_bytes_per_s=machine.copy_bytes_per_s,
            update_parameters_per_s=machine.update_parameters_per_s,
        )
        self.found = self.found.merged(finder.found)
        self.warnings += finder.warnings
        self._forget_if_busy(others_cpu_share(began, CpuTime.now()))

    def _forget_if_busy(self, others_share: float | None) -> None:
        """Says that others had the cores, and leaves what was measured then out of the profile."""
        note = busy_note(others_share)
        if note is None or self.found == MachineProfile():
            return
        self.found = MachineProfile()
        self.warnings.append(
            f"while passes, kernels and copies were measured, {note}; plan again when it is free, "
            "as nothing of this is kept for the next plan"
        )

    def whole_prediction(self, config: Config, plan: RunPlan) -> Prediction:
        """Returns the times and the memory of the run, as far as they can be known."""
        prediction = self.prediction_of(config, plan)
        if self._passes is None or self._passes.activation_bytes is None:
            return prediction
        activation_bytes = self._passes.activation_bytes
        workspace_bytes = self._passes.workspace_bytes
        if workspace_bytes is None:  # at least the gradients of one unit on their way
            workspace_bytes = slot_bytes_of(plan.layout, plan.tiled)
        passes_bytes = activation_bytes + workspace_bytes
        return replace(
            prediction,
            rss_peak_bytes=self._baseline_bytes + plan.held_bytes + passes_bytes,
            activation_bytes=activation_bytes,
        )

    def prediction_of(self, config: Config, plan: RunPlan) -> Prediction:
        """Returns the times under another policy of the same run, with what was measured."""
        passes, machine = self._passes, self.machine
        if machine is None or passes is None:
            return Prediction()
        return predict_step(
            plan.layout,
            plan.host,
            plan.traffic,
            choices_of(config),
            machine=machine,
            passes=passes.units,
            other_s=passes.other_s,
            record_s=passes.record_s,
            tokens=tokens_per_step(config),
            handed_over=plan.handed_over,
            kept=plan.kept,
            carried=plan.carried,
            shares_cores=config.shares_cores,
            link=plan.link,
            device=plan.device,
        )

    def _held_before(self) -> int:
        """Returns what the process holds before the run's own memory: imports, data, warm-up."""
        config = self._config
        text = open_text(
            config.data.source,
            files=config.data.files,
            validation_fraction=config.data.validation_fraction,
        )
        warm_up(config)
        trim_heap()
        rss_bytes = current_rss_bytes()
        del text
        return rss_bytes

    def _paths(self) -> tuple[PathRates, ...]:
        limits = self._config.tiers.storage.rate_limits_of(len(self._directories))
        return tuple(
            self._path(directory).held_to(limit)
            for directory, limit in zip(self._directories, limits, strict=True)
        )

    def _path(self, directory: Path) -> PathRates:
        known = self._profile.find(directory)
        if known is not None:
            return PathRates(
                path=str(directory),
                read_bytes_per_s=known.read_bytes_per_s,
                write_bytes_per_s=known.write_bytes_per_s,
                mixed_bytes_per_s=known.mixed_bytes_per_s,
            )
        self._on_measure(f"path {directory}")
        settings = measured_settings(directory, profile=self._profile)
        with Engine(block_bytes=BLOCK_BYTES, paths=settings) as engine:
            return probe_path(directory, engine, self._size(), patience=_PATIENCE)

    def _copy_rate(self) -> float:
        known = self._profile.find_memory(threads=self._threads)
        if known is not None:
            return known.copy_bytes_per_s
        self._on_measure("copies in memory")
        rate = copy_rate_bytes_per_s()
        measured = MemoryProfile(threads=self._threads, copy_bytes_per_s=rate, measured_at=_now())
        self.found = self.found.merged(MachineProfile(memory=(measured,)))
        return rate

    def _update_rate(self) -> float:
        optimizer, dtype = self._config.optimizer, self._plan.layout.usual_dtype
        known = self._profile.find_kernel(
            rule=optimizer.rule, codec=optimizer.codec, dtype=dtype, threads=self._threads
        )
        if known is not None:
            return known.parameters_per_s
        self._on_measure("the fused update in memory")
        rate = probe_update(
            load_kernels(),
            codec=optimizer.codec,
            dtype=dtype,
            size=self._size(),
            rule=optimizer.rule,
        )
        measured = KernelProfile(
            rule=optimizer.rule,
            codec=optimizer.codec,
            dtype=dtype,
            threads=self._threads,
            parameters_per_s=rate,
            measured_at=_now(),
        )
        self.found = self.found.merged(MachineProfile(kernels=(measured,)))
        return rate

    def _link(self, copy_bytes_per_s: float) -> LinkRates | None:
        tier = self._config.tiers.device
        if tier.kind == "cuda":
            self._on_measure("the link to the device")
        return link_rates(tier, copy_bytes_per_s=copy_bytes_per_s)

    def _size(self) -> ProbeSize:
        plan = self._plan
        return ProbeSize.within(
            host_bytes=plan.host.budget_bytes if plan.host else plan.in_memory_bytes,
            storage_bytes=plan.storage.planned_bytes if plan.storage else 1 << 28,
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
