"""Subgroups and records: what one optimizer update reads, changes and writes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.layout.codec import WHOLE_RULE, section_kinds
from offload.layout.dtypes import DTYPES
from offload.layout.units import (
    PARAMETER_ALIGNMENT,
    SUBGROUP_ALIGNMENT,
    TRANSFER_ALIGNMENT,
    FlatShard,
)
from offload.sizes import round_up


@dataclass(frozen=True, kw_only=True)
class Subgroup:
    """A contiguous element range of one flat shard."""

    shard: str
    index: int
    start: int
    stop: int
    itemsize: int
    is_whole: bool = False
    """It holds one parameter that is updated as a whole matrix."""

    @cached_property
    def name(self) -> str:
        return f"{self.shard}#{self.index}"

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def offset_bytes(self) -> int:
        """Where its parameters begin in the flat shard."""
        return self.start * self.itemsize

    @property
    def parameter_bytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def padded_parameter_bytes(self) -> int:
        return round_up(self.parameter_bytes, TRANSFER_ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One array of a record: `name` of one subgroup."""

    name: str
    subgroup: str
    dtype: str
    offset_bytes: int
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Record:
    """The stored state of one subgroup, or of several small neighbouring ones."""

    name: str
    subgroups: tuple[Subgroup, ...]
    sections: tuple[Section, ...]
    num_bytes: int

    @property
    def padded_bytes(self) -> int:
        return round_up(self.num_bytes, TRANSFER_ALIGNMENT)

    @property
    def padded_parameter_bytes(self) -> int:
        """Bytes of its subgroups' parameters, each padded to the transfer alignment."""
        return sum(subgroup.padded_parameter_bytes for subgroup in self.subgroups)

    def sections_of(self, subgroup: Subgroup) -> Mapping[str, Section]:
        """Returns the sections of one of its subgroups by name."""
        return self._sections_by_subgroup[subgroup.name]

    @cached_property
    def _sections_by_subgroup(self) -> dict[str, dict[str, Section]]:
        found: dict[str, dict[str, Section]] = {each.name: {} for each in self.subgroups}
        for section in self.sections:
            found[section.subgroup][section.name] = section
        return found


def split_shard(
    shard: FlatShard, *, subgroup_elements: int, whole: frozenset[str] = frozenset()
) -> tuple[Subgroup, ...]:
    """Returns the shard cut into even subgroups of at most about `subgroup_elements`.

    A parameter named in `whole` is a subgroup of its own, however large.
    """
    subgroups: list[Subgroup] = []
    for stretch in _stretches(shard, whole):
        for start in range(stretch.start, stretch.stop, stretch.size(subgroup_elements)):
            stop = min(start + stretch.size(subgroup_elements), stretch.stop)
            subgroups.append(
                Subgroup(
                    shard=shard.name,
                    index=len(subgroups),
                    start=start,
                    stop=stop,
                    itemsize=shard.itemsize,
                    is_whole=stretch.is_whole,
                )
            )
    return tuple(subgroups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A part of a shard that is cut by itself: one whole parameter, or what is between two."""

    start: int
    stop: int
    is_whole: bool

    def size(self, subgroup_elements: int) -> int:
        num_elements = self.stop - self.start
        if self.is_whole:
            return num_elements
        count = -(-num_elements // max(subgroup_elements, SUBGROUP_ALIGNMENT))
        return round_up(-(-num_elements // count), SUBGROUP_ALIGNMENT)


def _stretches(shard: FlatShard, whole: frozenset[str]) -> Iterator[_Stretch]:
    end = 0
    for placed in shard.parameters:
        if placed.facts.name not in whole or not placed.facts.num_elements:
            continue
        if end < placed.start:
            yield _Stretch(start=end, stop=placed.start, is_whole=False)
        yield _Stretch(start=placed.start, stop=placed.stop, is_whole=True)
        end = round_up(placed.stop, SUBGROUP_ALIGNMENT)
    if end < shard.num_elements:
        yield _Stretch(start=end, stop=shard.num_elements, is_whole=False)


def gather_records(
    subgroups: Sequence[tuple[Subgroup, str]], *, codec: str, rule: str, record_elements: int
) -> tuple[Record, ...]:
    """Returns the records of trainable `subgroups` (each with its dtype), neighbours merged.

    Neighbours share a record while it holds at most `record_elements`, so that none is tiny.
    Their state is that of `rule`, of whole matrices that of `muon`.
    """
    records: list[Record] = []
    for members in _merge(subgroups, limit=record_elements):
        sections, num_bytes = _lay_out_sections(members, codec, rule)
        first = members[0][0].name
        name = first if len(members) == 1 else f"{first}+{len(members) - 1}"
        records.append(
            Record(
                name=name,
                subgroups=tuple(subgroup for subgroup, _ in members),
                sections=sections,
                num_bytes=num_bytes,
            )
        )
    return tuple(records)


def _merge(
    subgroups: Sequence[tuple[Subgroup, str]], *, limit: int
) -> Iterator[list[tuple[Subgroup, str]]]:
    members: list[tuple[Subgroup, str]] = []
    total = 0
    for member in subgroups:
        if members and total + member[0].num_elements > limit:
            yield members
            members, total = [], 0
        members.append(member)
        total += member[0].num_elements
    if members:
        yield members


def _lay_out_sections(
    members: Sequence[tuple[Subgroup, str]], codec: str, rule: str
) -> tuple[tuple[Section, ...], int]:
    sections: list[Section] = []
    end = 0
    for subgroup, dtype in members:
        for kind in section_kinds(codec, dtype, WHOLE_RULE if subgroup.is_whole else rule):
            start = round_up(end, PARAMETER_ALIGNMENT)
            sections.append(
                Section(
                    name=kind.name,
                    subgroup=subgroup.name,
                    dtype=kind.dtype,
                    offset_bytes=start,
                    num_elements=subgroup.num_elements,
                )
            )
            end = start + sections[-1].num_bytes
    return tuple(sections), end
