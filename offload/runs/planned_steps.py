"""What the steps of a run use and move, by how its model is arranged."""

from dataclasses import dataclass, replace
from functools import cached_property

from offload.config import Config
from offload.plan.handover import handed_over, handed_over_bytes, records_under_forward
from offload.plan.link import LinkTraffic, link_traffic
from offload.plan.rhythm import Before, Rhythm
from offload.plan.spilling import SpilledBytes, spilled_traffic, usual_arrivals
from offload.plan.traffic import (
    ModelBytes,
    StepTraffic,
    cached_state_bytes,
    step_traffic,
    updated_records,
)
from offload.plan.uses import After, Reads, Uses, reads_of
from offload.runs.rehearsal import RehearsedModel, uses_by_modules
from offload.sizes import parse_duration
from offload.streaming.arrangement import Arrangement


@dataclass(frozen=True, kw_only=True)
class PlannedSteps:
    """The steps of a run under its policy."""

    config: Config
    arrangement: Arrangement
    uses: Uses
    """Which units a micro-step uses, in order."""
    without_gradient: frozenset[str]
    """Names of trainable parameters that get none."""
    arrivals: tuple[str, ...]
    """Names of parameters in the order of their gradients, where these are spilled."""

    @staticmethod
    def of(config: Config, model: RehearsedModel, arrangement: Arrangement) -> "PlannedSteps":
        """Returns the steps of the run's model.

        Args:
            config: Of the run.
            model: Of the run.
            arrangement: Of the model.
        """
        without_gradient = _without_gradient(config, model, arrangement)
        return PlannedSteps(
            config=config,
            arrangement=arrangement,
            uses=_uses(config, model, arrangement),
            without_gradient=without_gradient,
            arrivals=_arrivals(config, model, arrangement, without_gradient),
        )

    @cached_property
    def reads(self) -> Reads:
        """How often the passes of a micro-step read each unit."""
        return reads_of(self.uses, self._num_slots, tiled=self.arrangement.discovered.wide)

    @property
    def kept(self) -> frozenset[str]:
        """Names of the units that a backward finds in their slots, or does not ask for."""
        units = self.arrangement.layout.units
        return frozenset(u.name for i, u in enumerate(units) if not self.reads.backward[i])

    @property
    def carried(self) -> str | None:
        """Name of the unit that forwards after a step's first find in its slot; None: no such."""
        index = self.reads.carried
        return None if index is None else self.arrangement.layout.units[index].name

    @cached_property
    def handed_over(self) -> frozenset[str]:
        """Subgroups that go from their update into a slot, in a usual step."""
        return self._handed_over_after(_usually_before(self.config))

    @cached_property
    def model_bytes(self) -> ModelBytes:
        """Of what the steps update."""
        return ModelBytes.of(self.arrangement.layout, without_gradient=self.without_gradient)

    def traffic(self) -> StepTraffic:
        """Returns the bytes that a usual step moves."""
        config, layout, reads = self.config, self.arrangement.layout, self.reads
        micro_steps = config.train.micro_steps
        first = self._kept_first_bytes(_usually_before(config))
        later = [reads.kept_forward_bytes(layout, "backward")] * (micro_steps - 1)
        cached_bytes, spilled = 0, None
        if config.offload:
            host, without = self.arrangement.host, self.without_gradient
            cached_bytes = cached_state_bytes(
                layout, config.policy.order, host.num_cached, without_gradient=without
            )
            spilled = self._spilled()
        return step_traffic(
            self.model_bytes,
            parameters=config.parameter_tier,
            optimizer=config.optimizer_tier,
            micro_steps=micro_steps,
            cached_state_bytes=cached_bytes,
            kept_forward_bytes=[first, *later],
            kept_backward_bytes=[reads.kept_backward_bytes(layout)] * micro_steps,
            spilled=spilled,
        )

    def _spilled(self) -> SpilledBytes:
        """Returns what a step moves of the gradients that are spilled."""
        arrangement = self.arrangement
        return spilled_traffic(
            arrangement.layout,
            arrangement.host.gradients,
            arrivals=self.arrivals,
            micro_steps=self.config.train.micro_steps,
        )

    def rhythm(self) -> Rhythm:
        """Returns what happens between the steps; what goes by the clock is not foreseen."""
        config = self.config
        rhythm = Rhythm(
            validation=config.train.eval_every,
            commits=tuple(each for each in commit_intervals(config) if isinstance(each, int)),
        )
        kinds = rhythm.kinds
        if len(kinds) == 1:
            return rhythm
        usual_bytes = self._kept_first_bytes(_usually_before(config))
        more = {kind: usual_bytes - self._kept_first_bytes(kind) for kind in kinds}
        return replace(rhythm, more_read_bytes=more)

    def link(self) -> LinkTraffic | None:
        """Returns the bytes of a step to and from a device; None where there is no link."""
        config, layout, reads = self.config, self.arrangement.layout, self.reads
        if config.tiers.device.kind == "cpu":
            return None
        return link_traffic(
            layout,
            parameters=config.parameter_tier,
            gradient_dtype=config.train.gradient_dtype,
            micro_steps=config.train.micro_steps,
            kept_forward_bytes=reads.kept_forward_bytes(layout, _after(_usually_before(config))),
            kept_later_bytes=reads.kept_forward_bytes(layout, "backward"),
            kept_backward_bytes=reads.kept_backward_bytes(layout),
            adds_on_device=config.tiers.device.kind == "cuda",
        )

    @property
    def _num_slots(self) -> int:
        """How many slots the units of the run have where it computes."""
        arrangement = self.arrangement
        slots = arrangement.device if has_device_memory(self.config) else arrangement.host
        return slots.num_slots if self.config.offload else 0

    def _kept_first_bytes(self, before: Before) -> int:
        """Returns what the first forward of a step after `before` does not read."""
        layout = self.arrangement.layout
        handed_over = handed_over_bytes(layout, self._handed_over_after(before))
        return self.reads.kept_forward_bytes(layout, _after(before)) + handed_over

    def _handed_over_after(self, before: Before) -> frozenset[str]:
        """Returns the subgroups that go from their update into a slot, in a step after `before`."""
        policy, arrangement = self.config.policy, self.arrangement
        if not self.config.offload or policy.parameters != "storage":
            return frozenset()
        if before == "validation":  # its forward takes them
            return frozenset()
        host, layout = arrangement.host, arrangement.layout
        updated = {record.name for record in updated_records(layout, self.without_gradient)}
        under_forward = records_under_forward(layout, policy.order, policy.overlap, host.num_cached)
        return handed_over(
            layout,
            # Where the device has memory of its own they come through the slots in the host's.
            min(self._num_slots, host.num_slots),
            records=under_forward & updated,
            uses=self.uses,
            tiled=arrangement.discovered.wide_names,
            is_finished_at_once=before == "commit",
        )


def has_device_memory(config: Config) -> bool:
    """Returns whether the run has a device budget: its device has memory of its own."""
    return config.offload and config.tiers.device.kind != "cpu"


def commit_intervals(config: Config) -> tuple[float | int, ...]:
    """Returns those of commits and of checkpoints: seconds, or steps where it is an `int`."""
    every = (config.tiers.storage.commit_every, config.checkpoint.save_every)
    return tuple(parse_duration(each) if isinstance(each, str) else each for each in every)


def _uses(config: Config, model: RehearsedModel, arrangement: Arrangement) -> Uses:
    if config.policy.parameters == "storage" or has_device_memory(config):
        return model.uses(arrangement.discovered)
    # Passes read nothing: a rehearsal would take a second for a large model.
    return uses_by_modules(model.module, arrangement.discovered)


def _without_gradient(
    config: Config, model: RehearsedModel, arrangement: Arrangement
) -> frozenset[str]:
    """Returns the names of trainable parameters that get no gradient; models of ours have none."""
    tiers = (config.parameter_tier, config.optimizer_tier)
    if config.model.factory is None or "storage" not in tiers:
        return frozenset()
    return model.without_gradient(arrangement.discovered)


def _arrivals(
    config: Config,
    model: RehearsedModel,
    arrangement: Arrangement,
    without_gradient: frozenset[str],
) -> tuple[str, ...]:
    """Returns the parameters in the order of their gradients; none where none are spilled."""
    if not config.offload or not arrangement.host.gradients.spilled:
        return ()  # a rehearsal would take a second for a large model
    found = model.arrivals(arrangement.discovered)
    return found or tuple(usual_arrivals(arrangement.layout, without_gradient))


def _after(before: Before) -> After:
    """Returns what the first forward of a step follows."""
    return "forward" if before == "validation" else "update"


def _usually_before(config: Config) -> Before:
    """Returns what every step begins after."""
    if config.train.eval_every == 1:
        return "validation"
    is_each = 1 in (config.tiers.storage.commit_every, config.checkpoint.save_every)
    return "commit" if is_each else "step"
