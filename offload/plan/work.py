"""What a step of a model consists of, as far as time is concerned: the input of a simulation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from offload.layout import ModelLayout, Record, Unit, section_kinds
from offload.plan.host import Placement
from offload.plan.link import LinkTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """One unit in one micro-step."""

    forward_s: float
    backward_s: float
    frozen_bytes: int = 0
    """Of its parameters on storage that no update writes."""
    is_kept: bool = False
    """Whether backward finds it in the slot of its forward, or does not ask for it."""
    is_carried: bool = False
    """Whether a forward finds it where the backward of the micro-step before left it."""
    link_bytes: int = 0
    """Copied to the device before each use."""
    gradient_link_bytes: int = 0
    """Copied from the device after its first backward of a step."""
    later_gradient_link_bytes: int = 0
    """Copied to it and from it again after each later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The parameters of one unit within one record."""

    unit: int
    num_bytes: int
    """On storage; 0 where parameters are resident."""
    is_read: bool
    """Whether the update needs the old values."""
    is_handed_over: bool = False
    """Whether an update under a forward finds the unit's slot: it is not read then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWork:
    """One record in one update."""

    num_parameters: int
    state_bytes: int
    """On storage, read and written; 0 where the state is resident."""
    pieces: tuple[Piece, ...]
    spilled_bytes: int = 0
    """Gradients written when its units' backward is over, and read back by the update."""
    link_bytes: int = 0
    """Copied to the device after its update, where its parameters live there."""

    @property
    def has_parameters(self) -> bool:
        """Whether parameters of it live on storage."""
        return any(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """All of one step."""

    units: tuple[UnitWork, ...]
    records: tuple[RecordWork, ...]
    micro_steps: int = 1
    other_s: float = 0.0
    """Between the last backward and the update: loss, norm and clip."""
    record_s: float = 0.0
    """Of an update, for each record, beside the fused pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Of one unit in one micro-step, alone."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPasses:
    """What a micro-step of a model takes."""

    units: tuple[PassTimes, ...]
    other_s: float
    """Of a step: what is neither pass nor update."""
    activation_bytes: int | None = None
    """Most at one time; None where that is not known."""
    workspace_bytes: int | None = None
    """Resident beside them, gradients on their way included; None where that is not known."""
    record_s: float = 0.0
    """Of an update, for each record, beside the fused pass."""

    def scaled(self, *, forward_s: float, backward_s: float) -> tuple[PassTimes, ...]:
        """Returns units that take so long together, each its share of it."""
        forward = sum(unit.forward_s for unit in self.units)
        backward = sum(unit.backward_s for unit in self.units)
        return tuple(
            PassTimes(
                forward_s=forward_s * _share(unit.forward_s, forward, len(self.units)),
                backward_s=backward_s * _share(unit.backward_s, backward, len(self.units)),
            )
            for unit in self.units
        )


def _share(part: float, whole: float, num_parts: int) -> float:
    return part / whole if whole else 1 / num_parts


def work_of(
    layout: ModelLayout,
    *,
    parameters: Placement,
    optimizer: Placement,
    passes: Sequence[PassTimes],
    micro_steps: int = 1,
    other_s: float = 0.0,
    record_s: float = 0.0,
    link: LinkTraffic | None = None,
    spilled: Mapping[str, int] | None = None,
    handed_over: Collection[str] = (),
    kept: Collection[str] = (),
    carried: str | None = None,
) -> StepWork:
    """Returns what the engine does in a step of the model of `layout`.

    Args:
        layout: Of the model.
        parameters: Where they live.
        optimizer: Where its state lives.
        passes: Of each unit.
        micro_steps: Forward and backward passes in the step.
        other_s: Time of what is neither pass nor update.
        record_s: Of an update, for each record, beside the fused pass.
        link: What goes over the link to a device; None where there is none.
        spilled: Bytes of the gradients of each subgroup that is spilled, by name.
        handed_over: Names of the subgroups whose updates find their unit's slot.
        kept: Names of the units that a backward finds in their slots, or does not ask for.
        carried: Name of the unit that forwards after the first find in its slot.
    """
    on_storage = parameters == "storage"
    units = tuple(
        _unit_work(
            unit,
            times,
            on_storage=on_storage,
            is_kept=unit.name in kept,
            is_carried=unit.name == carried,
            link=link,
            copies_parameters=parameters != "device",
            num_trainable=layout.trainable_elements,
        )
        for unit, times in zip(layout.units, passes, strict=True)
    )
    number_of = {shard.name: n for n, unit in enumerate(layout.units) for shard in unit.shards}
    return StepWork(
        units=units,
        records=tuple(
            _record_work(
                layout,
                record,
                number_of,
                parameters,
                optimizer,
                spilled or {},
                handed_over,
                link=link,
            )
            for record in layout.records
        ),
        micro_steps=micro_steps,
        other_s=other_s,
        record_s=record_s,
    )


def _unit_work(
    unit: Unit,
    times: PassTimes,
    *,
    on_storage: bool,
    is_kept: bool,
    is_carried: bool,
    link: LinkTraffic | None,
    copies_parameters: bool,
    num_trainable: int,
) -> UnitWork:
    elements = sum(shard.num_elements for shard in unit.shards if shard.is_trainable)

    def part_of(num_bytes: int) -> int:
        return -(-num_bytes * elements // num_trainable) if num_trainable else 0

    return UnitWork(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        frozen_bytes=sum(s.padded_bytes for s in unit.shards if not s.is_trainable)
        if on_storage
        else 0,
        is_kept=is_kept,
        is_carried=is_carried,
        link_bytes=unit.num_bytes if link and copies_parameters else 0,
        gradient_link_bytes=part_of(link.gradient_bytes) if link else 0,
        later_gradient_link_bytes=part_of(link.later_gradient_bytes) if link else 0,
    )


def _record_work(
    layout: ModelLayout,
    record: Record,
    number_of: dict[str, int],
    parameters: Placement,
    optimizer: Placement,
    spilled: Mapping[str, int],
    handed_over: Collection[str],
    *,
    link: LinkTraffic | None,
) -> RecordWork:
    on_storage = parameters == "storage"
    goes_up = link is not None and parameters == "device"
    state_bytes = record.padded_bytes if optimizer == "storage" else 0
    pieces = []
    for subgroup in record.subgroups:
        # A whole master in the state gives the parameter that the update needs.
        dtype = layout.shards[subgroup.shard].dtype
        kinds = section_kinds(layout.codec, dtype, layout.rule)
        has_master = any(kind.name == "master" for kind in kinds) and not subgroup.is_whole
        num_bytes = subgroup.padded_parameter_bytes if on_storage else 0
        pieces.append(
            Piece(
                unit=number_of[subgroup.shard],
                num_bytes=num_bytes,
                is_read=not has_master,
                is_handed_over=on_storage and subgroup.name in handed_over,
            )
        )
    return RecordWork(
        num_parameters=sum(subgroup.num_elements for subgroup in record.subgroups),
        state_bytes=state_bytes,
        pieces=tuple(pieces),
        spilled_bytes=sum(spilled.get(subgroup.name, 0) for subgroup in record.subgroups),
        link_bytes=sum(s.parameter_bytes for s in record.subgroups) if goes_up else 0,
    )
