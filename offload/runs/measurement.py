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
from offload.plan.gradients import keep_gradients
from offload.plan.machine import Machine, PathRates
from offload.plan.machine_profile import (
    KernelProfile,
    MachineProfile,
    MemoryProfile,
    PassProfile,
)
from offload.plan.prediction import Prediction, predict_step
from offload.plan.run_plan import RunPlan
from offload.plan.tiles import slot_bytes_of
from offload.plan.work import PassTimes
from offload.runs.data import open_text
from offload.runs.pass_estimate import PassEstimate, estimate_passes
from offload.runs.pass_probe import pass_shape, probe_passes
from offload.runs.planned_storage import BLOCK_BYTES
from offload.runs.planning import choices_of, tokens_per_step
from offload.runs.probe import ProbeSize, probe_path, probe_update
from offload.runs.rss import current_rss_bytes
from offload.runs.warm_up import warm_up
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings
from offload.streaming.activation_store import STORAGES_UNDER_WAY

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
        self._measured_passes: PassProfile | None = None
        self._estimate: PassEstimate | None = None
        self.warnings: list[str] = []

    def take(self) -> None:
        """Measures what the profile lacks."""
        plan = self._plan
        self._baseline_bytes = self._held_before()
        self._measured_passes = self._passes()
        self.machine = Machine(
            paths=tuple(
                self._path(directory).held_to(limit)
                for directory, limit in zip(
                    self._directories,
                    self._config.tiers.storage.rate_limits_of(len(self._directories)),
                    strict=True,
                )
            )
            if plan.stores_anything
            else (),
            copy_bytes_per_s=self._copy_rate(),
            update_parameters_per_s=self._update_rate(),
        )
        if self._measured_passes is None:
            self._estimate = self._estimated(self.machine.copy_bytes_per_s)

    def whole_prediction(self, config: Config, plan: RunPlan) -> Prediction:
        """Returns the times and the memory of the run, as far as they can be known."""
        prediction, passes = self.prediction_of(config, plan), self._measured_passes
        if passes is None:  # what a model of the user's saves for backward is not counted
            return prediction
        activations = passes.activation_bytes + self._kept_layers() * passes.activation_layer_bytes
        return replace(
            prediction,
            rss_peak_bytes=self._baseline_bytes + round(activations) + _held_bytes(plan),
            activation_bytes=round(activations),
        )

    def prediction_of(self, config: Config, plan: RunPlan) -> Prediction:
        """Returns the times under another policy of the same run, with what was measured."""
        passes, estimate, machine = self._measured_passes, self._estimate, self.machine
        if machine is None or (passes is None and estimate is None):
            return Prediction()
        if passes is not None:
            units = self._by_unit(passes)
            other_s = passes.other_s + config.model.layers * passes.other_layer_s
        elif estimate is not None:
            units, other_s = list(estimate.units), estimate.other_s
        return predict_step(
            plan.layout,
            plan.host,
            plan.traffic,
            choices_of(config),
            machine=machine,
            passes=units,
            other_s=other_s,
            tokens=tokens_per_step(config),
        )

    def _kept_layers(self) -> int:
        """Returns of how many layers the activations that outlive their forward are in memory."""
        config, layers = self._config, self._config.model.layers
        if config.offload and moves_block_inputs(config):
            return min(layers, 2 * STORAGES_UNDER_WAY)
        return layers

    def _held_before(self) -> int:
        """Returns what the process holds before the run's own memory: imports, data, warm-up."""
        config = self._config
        text = open_text(
            config.data.source,
            files=config.data.files,
            validation_fraction=config.data.validation_fraction,
        )
        warm_up(config)
        rss_bytes = current_rss_bytes()
        del text
        return rss_bytes

    def _passes(self) -> PassProfile | None:
        config = self._config
        shape = pass_shape(config)
        known = None
        if shape is not None:
            known = self._profile.find_passes(shape, threads=self._threads)
        if known is not None or shape is None:
            return known
        self._on_measure("passes of a model of 1 and of 3 layers")
        budget = config.tiers.host.memory or self._plan.in_memory_bytes
        measured = probe_passes(config, most_bytes=max(budget, 1 << 30))
        trim_heap()
        if measured is not None:
            self.found = self.found.merged(MachineProfile(passes=(measured,)))
        return measured

    def _estimated(self, copy_bytes_per_s: float) -> PassEstimate | None:
        """Returns the passes of a model of the user's, or says why they are not known."""
        config, plan = self._config, self._plan
        if config.model.factory is None or config.tiers.device.kind != "cpu":
            return None
        self._on_measure("products of the model's largest layer")
        try:
            found = estimate_passes(
                config,
                [unit.name for unit in plan.layout.units],
                gradient_bytes=keep_gradients(
                    plan.layout, config.train.gradient_dtype
                ).resident_bytes,
                copy_bytes_per_s=copy_bytes_per_s,
            )
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises without values
            self.warnings.append(
                f"times are not predicted: `{config.model.factory}` cannot run without values "
                f"({type(error).__name__}: {error})"
            )
            return None
        self.warnings.append(
            "times of passes are estimated from the operations of the model, not measured; "
            "what is saved for backward, and so the RSS peak, is not known"
        )
        return found

    def _by_unit(self, passes: PassProfile) -> list[PassTimes]:
        """Layers take their time each; what is left is the last unit's, where the loss is."""
        elements = self._plan.element_units
        times = [
            PassTimes(forward_s=passes.forward_layer_s, backward_s=passes.backward_layer_s)
            if is_element
            else PassTimes(forward_s=0.0, backward_s=0.0)
            for is_element in elements
        ]
        times[-1] = PassTimes(
            forward_s=times[-1].forward_s + passes.forward_s,
            backward_s=times[-1].backward_s + passes.backward_s,
        )
        return times

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
        optimizer, layout = self._config.optimizer, self._plan.layout
        dtypes = [shard.dtype for shard in layout.shards.values() if shard.is_trainable]
        dtype = max(dtypes, key=dtypes.count, default="bfloat16")
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

    def _size(self) -> ProbeSize:
        plan = self._plan
        return ProbeSize.within(
            host_bytes=plan.host.budget_bytes if plan.host else plan.in_memory_bytes,
            storage_bytes=plan.storage.planned_bytes if plan.storage else 1 << 28,
        )


def moves_block_inputs(config: Config) -> bool:
    """Returns whether all that is saved between the layers of a built-in model is moved away."""
    model, asked = config.model, config.activations
    itemsize = 4 if model.dtype == "float32" else 2
    block_input_bytes = config.train.batch * model.context * model.width * itemsize
    is_moved = asked.offload != "none" and block_input_bytes >= asked.threshold
    return is_moved and asked.checkpoint == "unit"


def _held_bytes(plan: RunPlan) -> int:
    """Returns what the tiers hold in memory, and the gradients of one unit on their way."""
    transient = slot_bytes_of(plan.layout, plan.tiled)
    if plan.host is not None:
        return plan.host.planned_bytes + transient
    return plan.in_memory_bytes + transient


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
