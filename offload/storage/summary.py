"""What a store holds, seen from outside, without owning or changing it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.storage.manifest import SCHEMA
from offload.storage.manifest_files import ManifestFiles, read_newest_manifest
from offload.storage.ownership import OwnerRecord, live_owner


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
    manifest = read_newest_manifest(root)
    versions = manifest.records.values()
    num_blocks = sum(version.num_blocks for version in versions)
    return StoreSummary(
        root=root,
        schema=SCHEMA,
        sequence=manifest.sequence,
        block_bytes=manifest.block_bytes,
        head=manifest.head,
        num_records=len(manifest.records),
        num_bytes=sum(version.num_bytes for version in versions),
        bytes_by_path={root: num_blocks * manifest.block_bytes},
        owner=live_owner(root),
    )


def has_commit(root: Path) -> bool:
    """Returns whether `open` would find a complete commit at `root`: what `auto` resumes from.

    Raises:
        CorruptStateError: There are manifests and none is complete.
        StoreError: A newer `offload` wrote the newest one.
    """
    return root.is_dir() and ManifestFiles(root).newest() is not None
