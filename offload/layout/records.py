"""Subgroups and records: what one optimizer update reads, changes and writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.layout.codec import section_kinds
from offload.layout.dtypes import DTYPES
from offload.layout.units import PARAMETER_ALIGNMENT, TRANSFER_ALIGNMENT, FlatShard
from offload.sizes import round_up

SUBGROUP_ALIGNMENT = 4096
"""Subgroups begin at multiples of this many elements, so that each starts at a transfer
boundary of its flat shard for every itemsize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgroup:
    """A contiguous element range of one flat shard."""

    shard: str
    index: int
    start: int
    stop: int
    itemsize: int

    @property
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


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def sections_of(self, subgroup: Subgroup) -> dict[str, Section]:
        return {s.name: s for s in self.sections if s.subgroup == subgroup.name}


def split_shard(shard: FlatShard, *, subgroup_elements: int) -> tuple[Subgroup, ...]:
    """Returns the shard cut into even subgroups of at most about `subgroup_elements`."""
    if shard.num_elements == 0:
        return ()
    count = -(-shard.num_elements // max(subgroup_elements, SUBGROUP_ALIGNMENT))
    size = round_up(-(-shard.num_elements // count), SUBGROUP_ALIGNMENT)
    return tuple(
        Subgroup(
            shard=shard.name,
            index=index,
            start=start,
            stop=min(start + size, shard.num_elements),
            itemsize=shard.itemsize,
        )
        for index, start in enumerate(range(0, shard.num_elements, size))
    )


def gather_records(
    subgroups: Sequence[tuple[Subgroup, str]], *, codec: str, record_elements: int
) -> tuple[Record, ...]:
    """Returns the records of trainable `subgroups` (each with its dtype), neighbours merged.

    Neighbours share a record while it holds at most `record_elements`, so that none is tiny.
    """
    records: list[Record] = []
    for members in _merge(subgroups, limit=record_elements):
        sections, num_bytes = _lay_out_sections(members, codec)
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
    members: Sequence[tuple[Subgroup, str]], codec: str
) -> tuple[tuple[Section, ...], int]:
    sections: list[Section] = []
    end = 0
    for subgroup, dtype in members:
        for kind in section_kinds(codec, dtype):
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
