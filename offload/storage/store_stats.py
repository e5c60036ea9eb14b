"""What a store says of itself: counters, sizes, and where a block lies."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Cumulative counters since the store was opened, and its size now."""

    read_bytes: int
    """Of records, padding included."""
    write_bytes: int
    """Of records, padding included."""
    commit_bytes: int
    """Of manifests."""
    checkpoint_read_bytes: int
    """Of records of checkpoints, to copy them elsewhere."""
    live_bytes: int
    """In blocks that a version, committed or current, or a reader needs."""
    file_bytes: int
    """Of the data files, free blocks included."""
    paths: "tuple[PathStats, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStats:
    """Counters of one path since the store was opened, and its state now."""

    root: Path
    use: str
    read_bytes: int
    write_bytes: int
    live_bytes: int
    round_trip_bytes_per_s: float | None
    """Bytes in and out again each second, as measured lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlace:
    """Where a block of a record lies."""

    root: Path
    file: str
    offset: int
