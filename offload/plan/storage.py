"""How many bytes of the storage paths a run needs, and how many it may use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.layout import ModelLayout, Record
from offload.sizes import GIB, MIB, format_size, round_up

BLOCK_BYTES = MIB
"""The block size of stores."""
_MANIFEST_BYTES = 8 * MIB
"""Room for the manifests that are kept: a few hundred bytes for each block of a record."""
_MOST_MARGIN_BYTES = GIB
_MARGIN_FRACTION = 100


def margin_bytes(total_bytes: int) -> int:
    """Returns what a store leaves free on a file system of `total_bytes`."""
    return min(_MOST_MARGIN_BYTES, total_bytes // _MARGIN_FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePath:
    """What there is of one path for a store."""

    device: int
    """Paths of the same number share their free bytes."""
    total_bytes: int
    free_bytes: int
    taken_bytes: int = 0
    """By a store that is gone on with."""
    capacity_bytes: int | None = None
    """What the data file may have at most."""


def usable_bytes(paths: Sequence[StoragePath]) -> int:
    """Returns what a store may have in all on `paths`; a device that several share counts once."""
    by_device: dict[int, list[StoragePath]] = {}
    for path in paths:
        by_device.setdefault(path.device, []).append(path)
    return sum(_usable_on(group) for group in by_device.values())


def _usable_on(paths: Sequence[StoragePath]) -> int:
    taken = sum(path.taken_bytes for path in paths)
    one = paths[0]
    usable = taken + max(0, one.free_bytes - margin_bytes(one.total_bytes))
    capacities = [path.capacity_bytes for path in paths]
    return min(usable, sum(usable if most is None else most for most in capacities))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpace:
    """The bytes of a store when it is largest, by what needs them."""

    version_bytes: int
    """Of one version of everything."""
    num_versions: int
    """Committed and current; only current without commits."""
    num_checkpoints: int
    """Each keeps a version more, as every step writes everything anew."""
    window_bytes: int
    """Of records that are being written while their versions before are still there."""
    unused_bytes: int = 0
    """Of one version, in the last blocks of states and of parameters: small records leave most of a
    block unused."""
    frozen_bytes: int = 0
    """Of parameters that never change: all versions share them."""
    spill_bytes: int = 0
    """Of activations and gradients that are away at one time, in files beside those of the
    store."""

    @property
    def total_bytes(self) -> int:
        versions = self.num_versions + self.num_checkpoints
        once = self.frozen_bytes + self.window_bytes + self.spill_bytes
        return versions * self.version_bytes + once + _MANIFEST_BYTES

    def describe(self) -> str:
        """Returns what the bytes are for."""
        spilled = f", {format_size(self.spill_bytes)} spilled" if self.spill_bytes else ""
        unused = f" ({format_size(self.unused_bytes)} of it unused in blocks of small records)"
        return (
            f"{self.num_versions} versions and {self.num_checkpoints} checkpoints of "
            f"{format_size(self.version_bytes)}{unused if self.is_mostly_unused else ''}, "
            f"{format_size(self.window_bytes)} being written{spilled}"
        )

    @property
    def is_mostly_unused(self) -> bool:
        """Whether blocks take half as much again as what is in them, or more."""
        return 3 * self.unused_bytes >= self.version_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePlan:
    """Bytes that the store needs and what is there for them."""

    space: StoreSpace
    free_bytes: int
    """What the store may use, with what it has already and without a margin."""
    capacity_bytes: int | None
    """`tiers.storage.capacity`, where it is set."""

    @property
    def planned_bytes(self) -> int:
        return self.space.total_bytes

    @property
    def budget_bytes(self) -> int:
        if self.capacity_bytes is None:
            return self.free_bytes
        return min(self.capacity_bytes, self.free_bytes)

    def reasons(self, *, path: str) -> list[str]:
        """Returns why the store does not fit; empty if it does."""
        found: list[str] = []
        needed = f"{self.planned_bytes} bytes ({format_size(self.planned_bytes)}: "
        needed += f"{self.space.describe()})"
        lower = ", or lower `checkpoint.keep_last`" if self.space.num_checkpoints else ""
        if self.planned_bytes > self.free_bytes:
            missing = self.planned_bytes - self.free_bytes
            found.append(
                f"the store does not fit path `{path}`: expected {needed} free, found "
                f"{self.free_bytes} bytes ({format_size(self.free_bytes)}) but for a margin; free "
                f"{format_size(missing)} there or change `tiers.storage.paths`{lower}"
            )
        if self.capacity_bytes is not None and self.planned_bytes > self.capacity_bytes:
            found.append(
                f"the store does not fit `tiers.storage.capacity`: expected at least {needed}, "
                f"found {self.capacity_bytes} bytes ({format_size(self.capacity_bytes)}); raise "
                f"`tiers.storage.capacity`{lower}"
            )
        return found


def store_space(
    layout: ModelLayout,
    *,
    block_bytes: int,
    durability: str,
    num_buffers: int,
    num_checkpoints: int = 0,
    is_staged: bool = False,
    spill_bytes: int = 0,
) -> StoreSpace:
    """Returns the space of a store when it is largest.

    Args:
        layout: Of the model.
        block_bytes: Of the store: each record takes whole blocks.
        durability: `commit` keeps a committed version beside the current one.
        num_buffers: The most records that are written at one time.
        num_checkpoints: The most that are kept.
        is_staged: Whether a step writes its versions before they become current.
        spill_bytes: Of activations and gradients, at most.
    """
    is_committed = durability == "commit"
    sizes = [_blocks_bytes(record, block_bytes) for record in layout.records]
    used_bytes = sum(sum(_sizes_of(record)) for record in layout.records)
    in_records = {s.name for record in layout.records for s in record.subgroups}
    frozen = (
        round_up(subgroup.padded_parameter_bytes, block_bytes)
        for subgroups in layout.subgroups.values()
        for subgroup in subgroups
        if subgroup.name not in in_records
    )
    return StoreSpace(
        version_bytes=sum(sizes),
        unused_bytes=sum(sizes) - used_bytes,
        frozen_bytes=sum(frozen),
        num_versions=1 + is_committed + is_staged,
        num_checkpoints=num_checkpoints if is_committed else 0,
        window_bytes=sum(sorted(sizes)[-num_buffers:]) if num_buffers else 0,
        spill_bytes=spill_bytes,
    )


def _blocks_bytes(record: Record, block_bytes: int) -> int:
    """Returns what the state of a record and the parameters of its subgroups take."""
    return sum(round_up(size, block_bytes) for size in _sizes_of(record))


def _sizes_of(record: Record) -> Iterator[int]:
    yield record.padded_bytes
    for subgroup in record.subgroups:
        yield subgroup.padded_parameter_bytes
