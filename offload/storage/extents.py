"""Versions of records: which blocks of which data file hold which bytes.

Pure data and geometry: no file is touched here.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from offload.sizes import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """`num_blocks` neighbouring blocks of the data file of one path."""

    path_index: int
    first_block: int
    num_blocks: int

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks


def empty_checksums() -> "array[int]":
    """Returns an array for xxh3-64 values: 64 bits, no sign."""
    return array("Q")


@dataclass(slots=True, kw_only=True, eq=False)
class Version:
    """One written state of a record. Two versions are equal only if they are the same one."""

    num_bytes: int
    """The bytes in use; what follows them in the last block is padding."""
    extents: tuple[Extent, ...]
    """In the order of the record's bytes."""
    checksums: "array[int]" = field(default_factory=empty_checksums)
    """xxh3-64 of the bytes in use of each block; complete before the version is published."""
    serial: int = 0
    """Order of allocation: of two writes of a record the later one is current."""
    references: int = 0
    """How many of {current, committed, reader, writer} need the blocks; 0: they are free."""

    @property
    def num_blocks(self) -> int:
        return sum(extent.num_blocks for extent in self.extents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A contiguous byte range of a data file and where it lies in the caller's memory."""

    path_index: int
    offset: int
    """In the data file."""
    start: int
    """In memory."""
    num_bytes: int
    """What is moved: the bytes in use, and padding up to the alignment."""
    first_block: int
    """Index within the record of the first block moved."""
    bytes_in_use: int


def num_blocks_for(num_bytes: int, block_bytes: int) -> int:
    """Returns how many blocks hold `num_bytes`."""
    return -(-num_bytes // block_bytes)


def moves_of(
    version: Version,
    *,
    block_bytes: int,
    alignment: int,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Move]:
    """Yields the moves for bytes `start` to `stop` of a version, in order.

    Args:
        version: Whose bytes.
        block_bytes: Of the store.
        alignment: What lengths are rounded up to.
        start: A multiple of `block_bytes`.
        stop: A multiple of `block_bytes`, or the version's end (the default).
    """
    stop = version.num_bytes if stop is None else stop
    position = 0  # of the extent's first byte within the record
    for extent in version.extents:
        end = position + extent.num_blocks * block_bytes
        low, high = max(start, position), min(stop, end)
        if low < high:
            yield Move(
                path_index=extent.path_index,
                offset=extent.first_block * block_bytes + low - position,
                start=low - start,
                num_bytes=round_up(high - low, alignment),
                first_block=low // block_bytes,
                bytes_in_use=high - low,
            )
        position = end


def block_checksums(data: memoryview, block_bytes: int) -> "array[int]":
    """Returns the xxh3-64 of each block of `data`; the last one may be shorter."""
    return array(
        "Q",
        [xxh3_64_intdigest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)],
    )


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Returns the index of the first block whose checksum differs, or None."""
    for index, (left, right) in enumerate(zip(found, expected, strict=True)):
        if left != right:
            return index
    return None
