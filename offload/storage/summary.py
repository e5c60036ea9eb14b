"""What a store holds, seen from outside, without owning or changing it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.storage.manifest import SCHEMA
from offload.storage.opening import find_store, has_commit
from offload.storage.ownership import OwnerRecord, live_owner

__all__ = ["StoreSummary", "has_commit", "peek"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSummary:
    """The newest complete commit of a store, and who owns the store now."""

    root: Path
    schema: int
    sequence: int
    block_bytes: int
    head: dict[str, Any]
    """`schema`, `committed_at` (Unix time in seconds) and what the commit was given."""
    num_records: int
    num_bytes: int
    """In use, of all records."""
    bytes_by_path: dict[Path, int]
    """In blocks of the commit."""
    owner: OwnerRecord | None


def peek(root: Path) -> StoreSummary:
    """Returns what a store holds, also while another process owns it.

    Raises:
        StoreError: There is no store, or it has no commit yet.
        CorruptStateError: There are manifests and none is complete.
    """
    found = find_store([root])
    manifest = found.manifest
    versions = manifest.records.values()
    blocks = dict.fromkeys(range(manifest.num_paths), 0)
    for version in versions:
        for extent in version.extents:
            blocks[extent.path_index] += extent.num_blocks
    return StoreSummary(
        root=root,
        schema=int(manifest.head.get("schema", SCHEMA)),
        sequence=manifest.sequence,
        block_bytes=manifest.block_bytes,
        head=manifest.head,
        num_records=len(manifest.records),
        num_bytes=sum(version.num_bytes for version in versions),
        bytes_by_path={
            found.directory(index): count * manifest.block_bytes for index, count in blocks.items()
        },
        owner=live_owner(root),
    )
