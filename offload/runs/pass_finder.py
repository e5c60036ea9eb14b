"""How long the passes of a planned run take: known, measured in seconds, or estimated."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from offload.config import Config
from offload.layout import ModelLayout
from offload.plan.gradients import keep_gradients
from offload.plan.machine_profile import MachineProfile, PassProfile
from offload.plan.run_plan import RunPlan
from offload.plan.work import ModelPasses, PassTimes
from offload.runs.pass_estimate import estimate_passes
from offload.runs.pass_probe import pass_shape, probe_bytes, probe_passes
from offload.runs.refinement import run_shape
from offload.sizes import GIB
from offload.streaming.activation_store import STORAGES_UNDER_WAY


class PassFinder:
    """Finds the passes of one run.

    Attributes:
        found: What had to be measured.
        warnings: What a plan says of passes that were not.
    """

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        profile: MachineProfile,
        on_measure: Callable[[str], None],
    ) -> None:
        """Stores its arguments.

        Args:
            config: Of the run.
            plan: Of the run.
            profile: What is known of the machine.
            on_measure: Called before each measurement.
        """
        self.found = MachineProfile()
        self.warnings: list[str] = []
        self._config = config
        self._plan = plan
        self._profile = profile
        self._on_measure = on_measure
        self._threads = torch.get_num_threads()

    def find(
        self, *, copy_bytes_per_s: float, update_parameters_per_s: float
    ) -> ModelPasses | None:
        """Returns the passes as runs of this model took, else as shorter ones do, or estimated.

        None where they can't be known.

        Args:
            copy_bytes_per_s: Of copies in memory.
            update_parameters_per_s: Of the fused pass in memory.
        """
        config = self._config
        run = self._profile.find_run(
            run_shape(config, tiled=self._plan.tiled), threads=self._threads
        )
        layers = self._layer_passes(update_parameters_per_s, measures=run is None)
        passes = self._of_layers(layers) if layers is not None else None
        if passes is None and config.tiers.device.kind == "cpu":
            passes = self._estimated(copy_bytes_per_s, is_known=run is not None)
        elif passes is None and run is None:
            self.warnings.append(
                f"times are not predicted: passes on device `{config.tiers.device.kind}` are "
                "measured on shorter models alone, and of this one there is none, or none that "
                "the budget holds; they are once a run has measured them"
            )
        if run is None:
            return passes
        shares = passes or ModelPasses(units=_even(self._plan.layout), other_s=0.0)
        return ModelPasses(
            units=shares.scaled(forward_s=run.forward_s, backward_s=run.backward_s),
            other_s=run.other_s,
            activation_bytes=round(run.activation_bytes),
            workspace_bytes=(
                shares.workspace_bytes
                if run.workspace_bytes is None
                else round(run.workspace_bytes)
            ),
            record_s=shares.record_s,
        )

    def _layer_passes(
        self, update_parameters_per_s: float, *, measures: bool
    ) -> PassProfile | None:
        config = self._config
        shape = pass_shape(config)
        if shape is None:
            return None
        known = self._profile.find_passes(shape, threads=self._threads)
        is_whole = known is not None and known.record_s is not None
        budget_bytes = config.tiers.host.memory or self._plan.in_memory_bytes
        is_too_large = probe_bytes(config) > max(budget_bytes, GIB)
        if is_whole or not measures or is_too_large:
            return known
        self._on_measure("passes of a model of 1 and of 3 layers")
        measured = probe_passes(
            config, shape=shape, update_parameters_per_s=update_parameters_per_s
        )
        self.found = self.found.merged(MachineProfile(passes=(measured,)))
        return measured

    def _of_layers(self, passes: PassProfile) -> ModelPasses:
        """Layers take their time each; what is left is the last unit's, where the loss is."""
        times = [
            PassTimes(forward_s=passes.forward_layer_s, backward_s=passes.backward_layer_s)
            if is_element
            else PassTimes(forward_s=0.0, backward_s=0.0)
            for is_element in self._plan.element_units
        ]
        times[-1] = PassTimes(
            forward_s=times[-1].forward_s + passes.forward_s,
            backward_s=times[-1].backward_s + passes.backward_s,
        )
        activations = passes.activation_bytes + self._kept_layers() * passes.activation_layer_bytes
        layers, workspace = self._config.model.layers, passes.workspace_bytes
        if workspace is not None:
            workspace += layers * (passes.workspace_layer_bytes or 0.0)
        return ModelPasses(
            units=tuple(times),
            other_s=passes.other_s + layers * passes.other_layer_s,
            activation_bytes=round(activations),
            workspace_bytes=_rounded(workspace),
            record_s=passes.record_s or 0.0,
        )

    def _estimated(self, copy_bytes_per_s: float, *, is_known: bool) -> ModelPasses | None:
        """Returns the passes from the model's operations, or says why they are not known.

        Args:
            copy_bytes_per_s: Of copies in memory.
            is_known: How long they take is known, and only each unit's share is wanted.
        """
        config, plan = self._config, self._plan
        model = config.model.factory or config.model.kind
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
            if not is_known:
                self.warnings.append(
                    f"times are not predicted: `{model}` cannot run without values "
                    f"({type(error).__name__}: {error}); they are once a run has measured them"
                )
            return None
        if not is_known:
            why = "" if config.model.factory else ", as three of its layers exceed the budget"
            self.warnings.append(
                "times of passes are estimated from the operations of the model, not measured"
                f"{why}; what is saved for backward, and so the RSS peak, is not known until a run "
                "has measured it"
            )
        if config.activations.checkpoint == "unit":
            found = replace(found, units=_computed_again(found.units, plan.element_units))
        return found

    def _kept_layers(self) -> int:
        """Returns of how many layers the activations that outlive their forward are in memory."""
        config, layers = self._config, self._config.model.layers
        if config.offload and _moves_block_inputs(config):
            return min(layers, 2 * STORAGES_UNDER_WAY)
        return layers


def _computed_again(
    units: Sequence[PassTimes], element_units: Sequence[bool]
) -> tuple[PassTimes, ...]:
    """Returns the times where backward runs the forward of each layer again."""
    return tuple(
        replace(unit, backward_s=unit.backward_s + unit.forward_s) if is_element else unit
        for unit, is_element in zip(units, element_units, strict=True)
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _even(layout: ModelLayout) -> tuple[PassTimes, ...]:
    """Returns times in proportion to the units' bytes, where no more is known."""
    return tuple(
        PassTimes(forward_s=unit.num_bytes, backward_s=unit.num_bytes) for unit in layout.units
    )


def _moves_block_inputs(config: Config) -> bool:
    """Returns whether all that is saved between the layers of a built-in model is moved away."""
    model, asked = config.model, config.activations
    itemsize = 4 if model.dtype == "float32" else 2
    block_input_bytes = config.train.batch * model.context * model.width * itemsize
    is_moved = asked.offload != "none" and block_input_bytes >= asked.threshold
    return is_moved and asked.checkpoint == "unit"
