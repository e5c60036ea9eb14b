"""Units and flat shards: where each parameter lies inside the bytes that move together."""

from collections.abc import Iterator
from dataclasses import dataclass

from offload.layout.dtypes import DTYPES
from offload.layout.parameters import ParameterFacts, UnitFacts
from offload.sizes import round_up

PARAMETER_ALIGNMENT = 64
"""Every parameter view starts at a multiple of this, as `torch.empty` gives: then no kernel's
result depends on the address."""

TRANSFER_ALIGNMENT = 4096
"""Shards and records start at multiples of this, so that O_DIRECT reaches them on any device."""


SUBGROUP_ALIGNMENT = 4096
"""Subgroups begin at multiples of this many elements, so that each starts at a transfer
boundary of its flat shard for every itemsize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParameter:
    """A parameter and its element range in its flat shard."""

    facts: ParameterFacts
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.facts.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """A unit's parameters of one dtype, laid end to end."""

    name: str
    dtype: str
    is_trainable: bool
    parameters: tuple[PlacedParameter, ...]
    num_elements: int
    """Elements in use, the gaps that alignment leaves included."""
    offset_bytes: int
    """Where the shard begins in its unit's slot."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def padded_bytes(self) -> int:
        return round_up(self.num_bytes, TRANSFER_ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The smallest set of parameters that are fetched and released together."""

    name: str
    shards: tuple[FlatShard, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the slot that holds the unit, each shard padded to the transfer alignment."""
        return sum(shard.padded_bytes for shard in self.shards)

    def parameters(self) -> Iterator[PlacedParameter]:
        for shard in self.shards:
            yield from shard.parameters


def lay_out_unit(facts: UnitFacts, *, whole: frozenset[str] = frozenset()) -> Unit:
    """Returns the unit with its parameters sorted into flat shards by dtype and trainability.

    A parameter named in `whole` begins and ends where a subgroup can.
    """
    groups: dict[tuple[str, bool], list[ParameterFacts]] = {}
    for parameter in facts.parameters:
        groups.setdefault((parameter.dtype, parameter.is_trainable), []).append(parameter)
    shards: list[FlatShard] = []
    offset_bytes = 0
    for (dtype, is_trainable), members in groups.items():
        shard = _lay_out_shard(
            _shard_name(facts.name, dtype, is_trainable, is_only=len(groups) == 1),
            members,
            offset_bytes=offset_bytes,
            whole=whole,
        )
        shards.append(shard)
        offset_bytes += shard.padded_bytes
    return Unit(name=facts.name, shards=tuple(shards))


def _shard_name(unit: str, dtype: str, is_trainable: bool, *, is_only: bool) -> str:
    if is_only:
        return unit
    return f"{unit}:{dtype}" if is_trainable else f"{unit}:{dtype}:frozen"


def _lay_out_shard(
    name: str, members: list[ParameterFacts], *, offset_bytes: int, whole: frozenset[str]
) -> FlatShard:
    placed: list[PlacedParameter] = []
    end = 0
    was_whole = False
    for facts in members:
        is_whole = facts.name in whole
        at_border = is_whole or was_whole
        align = SUBGROUP_ALIGNMENT if at_border else PARAMETER_ALIGNMENT // facts.itemsize
        was_whole = is_whole
        start = round_up(end, align)
        placed.append(PlacedParameter(facts=facts, start=start))
        end = start + facts.num_elements
    return FlatShard(
        name=name,
        dtype=members[0].dtype,
        is_trainable=members[0].is_trainable,
        parameters=tuple(placed),
        num_elements=end,
        offset_bytes=offset_bytes,
    )
