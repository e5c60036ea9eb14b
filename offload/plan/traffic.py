"""Bytes that one step moves from and to storage, computed from the policy alone."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from offload.layout import ModelLayout, Record, section_kinds
from offload.plan.host import Placement
from offload.plan.spilling import SpilledBytes
from offload.policy import resolve_order


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStepTraffic:
    """Bytes of one micro-step: parameters fetched, gradients spilled and read back."""

    forward_read_bytes: int
    backward_read_bytes: int
    gradient_read_bytes: int = 0
    gradient_write_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTraffic:
    """Bytes of one update: state both ways, parameters both ways, spilled gradients."""

    state_bytes: int
    """S: state streamed in, and the same out."""
    parameter_read_bytes: int
    """U_u: parameters that the update needs and that are not resident."""
    parameter_write_bytes: int
    """U_w: trainable parameters that live on storage."""
    gradient_read_bytes: int = 0
    """G_u: spilled gradients that the update reads."""

    @property
    def read_bytes(self) -> int:
        return self.state_bytes + self.parameter_read_bytes + self.gradient_read_bytes

    @property
    def write_bytes(self) -> int:
        return self.state_bytes + self.parameter_write_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Bytes of one step, by micro-step and update."""

    micro_steps: tuple[MicroStepTraffic, ...]
    update: UpdateTraffic

    @property
    def read_bytes(self) -> int:
        return self.update.read_bytes + sum(
            m.forward_read_bytes + m.backward_read_bytes + m.gradient_read_bytes
            for m in self.micro_steps
        )

    @property
    def write_bytes(self) -> int:
        return self.update.write_bytes + sum(m.gradient_write_bytes for m in self.micro_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """The bytes of a model that its traffic depends on."""

    parameter_bytes: int
    """Of all parameters, frozen ones too."""
    trainable_parameter_bytes: int
    """Of those in records that a step updates."""
    update_parameter_bytes: int
    """Of these, those whose old value the update reads."""
    state_bytes: int
    """Of the records that a step updates."""

    @staticmethod
    def of(layout: ModelLayout, *, without_gradient: Collection[str] = ()) -> "ModelBytes":
        """Returns the bytes of `layout` without gaps and padding.

        Args:
            layout: Of the model.
            without_gradient: Names of parameters that get none.
        """
        trainable = update = state = 0
        for record in updated_records(layout, without_gradient):
            for subgroup in record.subgroups:
                dtype, parts = layout.shards[subgroup.shard].dtype, layout.parameters_in(subgroup)
                is_partly_updated = any(p.facts.name in without_gradient for p in parts)
                for placed in parts:
                    kinds = section_kinds(layout.codec, dtype, layout.rule_of(placed.facts.name))
                    elements = min(placed.stop, subgroup.stop) - max(placed.start, subgroup.start)
                    trainable += elements * subgroup.itemsize
                    state += elements * sum(kind.itemsize for kind in kinds)
                    # A whole master in the state makes the old parameter superfluous.
                    has_master = any(kind.name == "master" for kind in kinds)
                    is_read = is_partly_updated or not has_master
                    update += elements * subgroup.itemsize if is_read else 0
        return ModelBytes(
            parameter_bytes=sum(p.facts.num_bytes for _, p in layout.parameters.values()),
            trainable_parameter_bytes=trainable,
            update_parameter_bytes=update,
            state_bytes=state,
        )


def updated_records(layout: ModelLayout, without_gradient: Collection[str]) -> list[Record]:
    """Returns the records of which a parameter has a gradient: others are left alone.

    Args:
        layout: Of the model.
        without_gradient: Names of parameters that get none.
    """
    return [
        record
        for record in layout.records
        if not without_gradient
        or any(
            placed.facts.name not in without_gradient
            for subgroup in record.subgroups
            for placed in layout.parameters_in(subgroup)
        )
    ]


def kept_for_backward(
    layout: ModelLayout, num_slots: int, *, tiled: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Returns the names of the last units of forward, one for each slot: they stay for backward.

    Args:
        layout: Of the model; its units are in the order in which forward uses them.
        num_slots: Slots for units, without those that calls hold beside the unit in use.
        tiled: Names of units that no slot holds as a whole.
    """
    whole = [unit.name for unit in layout.units if unit.name not in tiled]
    return frozenset(whole[-num_slots:] if num_slots > 0 else ())


def bytes_of_units(layout: ModelLayout, names: Collection[str]) -> int:
    """Returns the bytes of the named units without gaps and padding."""
    units = (unit for unit in layout.units if unit.name in names)
    return sum(placed.facts.num_bytes for unit in units for placed in unit.parameters())


def cached_state_bytes(
    layout: ModelLayout,
    order: str,
    num_cached: int,
    *,
    steps: Iterable[int] = (1, 2),
    without_gradient: Collection[str] = (),
) -> int:
    """Returns H: bytes of the records that an update finds in memory, as the last step kept them.

    The mean of odd and even steps: an order may keep others in these, and records differ in size.

    Args:
        layout: Of the model.
        order: The policy's name.
        num_cached: Records for whose state there is room.
        steps: From 1. Where all are odd, or all even, it is theirs alone.
        without_gradient: Names of parameters that get none: a record of these alone is in no step.
    """
    records, turns = layout.records, {step % 2 for step in steps}
    updated = {record.name for record in updated_records(layout, without_gradient)}
    # What an odd step finds an even one has kept.
    kept = [resolve_order(order).kept(len(records), num_cached, 2 - (not turn)) for turn in turns]
    found = [records[index] for each in kept for index in each]
    return sum(record.num_bytes for record in found if record.name in updated) // len(turns)


def is_in_turns(order: str) -> bool:
    """Whether odd and even steps of an order keep other records, so that they move other bytes."""
    policy = resolve_order(order)
    return policy.kept(2, 1, step=1) != policy.kept(2, 1, step=2)


def step_traffic(
    model: ModelBytes,
    *,
    parameters: Placement,
    optimizer: Placement,
    micro_steps: int,
    cached_state_bytes: int = 0,
    kept_forward_bytes: Iterable[int] = (),
    kept_backward_bytes: Iterable[int] = (),
    spilled: SpilledBytes | None = None,
) -> StepTraffic:
    """Returns the traffic of one step under a policy.

    Args:
        model: The bytes of the model.
        parameters: Where parameters live.
        optimizer: Where the optimizer state lives.
        micro_steps: Forward and backward passes in the step.
        cached_state_bytes: H: whole records found in memory when their turn comes.
        kept_forward_bytes: Parameter bytes in a slot when each micro-step's forward asks for them,
            since they stayed or came there from their update, less what it reads again; 0 for
            micro-steps that are not given.
        kept_backward_bytes: The same for each backward.
        spilled: Gradients that are written, and read back by later micro-steps and by the update;
            None: there are none.
    """
    spilled = spilled or SpilledBytes.each_once(0, micro_steps)
    on_storage = parameters == "storage"
    streamed = model.parameter_bytes if on_storage else 0
    state = max(model.state_bytes - cached_state_bytes, 0) if optimizer == "storage" else 0
    return StepTraffic(
        micro_steps=tuple(
            MicroStepTraffic(
                forward_read_bytes=max(streamed - kept_forward, 0) if on_storage else 0,
                backward_read_bytes=max(streamed - kept_backward, 0) if on_storage else 0,
                gradient_read_bytes=gradient_read,
                gradient_write_bytes=gradient_write,
            )
            for gradient_read, gradient_write, kept_forward, kept_backward in zip(
                spilled.read_bytes,
                spilled.write_bytes,
                _padded(kept_forward_bytes, micro_steps),
                _padded(kept_backward_bytes, micro_steps),
                strict=True,
            )
        ),
        update=UpdateTraffic(
            state_bytes=state,
            parameter_read_bytes=model.update_parameter_bytes if on_storage else 0,
            parameter_write_bytes=model.trainable_parameter_bytes if on_storage else 0,
            gradient_read_bytes=spilled.update_bytes,
        ),
    )


def _padded(values: Iterable[int], length: int) -> list[int]:
    given = list(values)[:length]
    return given + [0] * (length - len(given))
