"""What a store consists of from open to close."""

import contextlib
import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, StoreError
from offload.storage.commits import Commits
from offload.storage.data_file import data_file_name
from offload.storage.path_rates import PathRates
from offload.storage.placement import Placement
from offload.storage.record_transfers import RecordTransfers
from offload.storage.room import Room
from offload.storage.store_options import LEAST_ALIGNMENT, StoreOptions
from offload.storage.store_paths import OpenPath, StorePath, close_paths, open_paths
from offload.storage.store_stats import BlockPlace, PathStats, StoreStats
from offload.storage.versions import VersionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreParts:
    """What a store has from open to close."""

    paths: list[OpenPath]
    versions: VersionTable
    transfers: RecordTransfers
    room: Room
    commits: Commits
    rates: PathRates
    block_bytes: int
    alignment: int

    def block_place(self, record: str, block: int, *, checkpoint: str | None) -> BlockPlace:
        """Returns where a block of a record, or of a checkpoint's, lies now."""
        at = block
        if checkpoint is None:
            version = self.versions.current(record)
        else:
            version = self.versions.checkpoint(checkpoint)[record]
        for extent in version.extents:
            if at < extent.num_blocks:
                return BlockPlace(
                    root=self.paths[extent.path_index].root,
                    file=data_file_name(extent.path_index),
                    offset=(extent.first_block + at) * self.block_bytes,
                )
            at -= extent.num_blocks
        raise ConfigError(
            f"record `{record}` has no block {block}: expected one of its {block - at}; "
            "ask for a block within it"
        )

    def bytes_by_path(self, record: str) -> dict[Path, int]:
        """Returns the bytes of a record's blocks on each path that has some."""
        found: dict[Path, int] = {}
        for extent in self.versions.current(record).extents:
            root = self.paths[extent.path_index].root
            found[root] = found.get(root, 0) + extent.num_blocks * self.block_bytes
        return found

    def load(self, name: str) -> dict[str, Any]:
        """Makes the versions of a checkpoint current and returns its head."""
        head = self.commits.checkpoint_heads().get(name)
        versions = self.versions.checkpoint(name)
        assert head is not None, "a checkpoint that keeps versions has a head"
        self.transfers.wait_all()
        self.versions.restore(versions)
        return head

    def stats(self) -> StoreStats:
        """Returns the counters."""
        return StoreStats(
            read_bytes=self.transfers.read_bytes,
            write_bytes=self.transfers.write_bytes,
            commit_bytes=self.commits.commit_bytes,
            checkpoint_read_bytes=self.transfers.checkpoint_read_bytes,
            live_bytes=self.versions.num_taken_blocks * self.block_bytes,
            file_bytes=self.versions.num_blocks * self.block_bytes,
            paths=tuple(self._path_stats(path) for path in self.paths),
        )

    def _path_stats(self, path: OpenPath) -> PathStats:
        read_bytes, write_bytes = self.transfers.bytes_on(path.index)
        return PathStats(
            root=path.root,
            use=path.use.value,
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            live_bytes=self.versions.num_taken_on(path.index) * self.block_bytes,
            round_trip_bytes_per_s=self.rates.round_trip_bytes_per_s(path.index),
        )


def open_new(options: StoreOptions) -> StoreParts:
    """Makes the data files of a store with nothing in it, in directories that this process owns."""
    return open_parts(
        options,
        options.paths,
        creates=range(len(options.paths)),
        store_id=uuid.uuid4().hex,
    )


def open_parts(
    options: StoreOptions,
    configs: Sequence[StorePath],
    *,
    creates: Container[int],
    store_id: str,
    reads_only: Container[Path] = (),
    read_only: bool = False,
) -> StoreParts:
    """Opens the data files and returns the parts over them, with nothing in them yet.

    Args:
        options: Of the store; its blocks are those of the data files.
        configs: The paths: those asked for, and those that the store has besides.
        creates: Indices of the paths that are new.
        store_id: The same in all manifests of the store.
        reads_only: Directories in which nothing is written.
        read_only: Whether another process may own the store.

    Raises:
        StoreError: Blocks are no multiple of the alignment that a path has.
    """
    paths = open_paths(
        configs,
        engines=options.engines,
        block_bytes=options.block_bytes,
        creates=creates,
        reads_only=reads_only,
    )
    with contextlib.ExitStack() as opened:
        opened.callback(close_paths, paths)
        alignment = max(LEAST_ALIGNMENT, *(path.data.file.alignment for path in paths))
        if options.block_bytes % alignment:
            raise StoreError(
                f"cannot use store `{options.root}` on this device: expected blocks that are "
                f"multiples of its alignment of {alignment} bytes, found {options.block_bytes}; "
                "use larger blocks"
            )
        parts = _parts_over(
            paths, options, alignment=alignment, store_id=store_id, read_only=read_only
        )
        opened.pop_all()
    return parts


def _parts_over(
    paths: list[OpenPath],
    options: StoreOptions,
    *,
    alignment: int,
    store_id: str,
    read_only: bool,
) -> StoreParts:
    block_bytes = options.block_bytes
    versions = VersionTable(
        block_bytes=block_bytes, num_blocks=[path.data.num_blocks() for path in paths]
    )
    commits = Commits(paths, versions=versions, block_bytes=block_bytes, store_id=store_id)
    rates = PathRates(
        [path.counters for path in paths],
        live_bytes=lambda index: versions.num_taken_on(index) * block_bytes,
        limits=[path.config.limit_bytes_per_s for path in paths],
    )
    placement = Placement(
        paths, versions=versions, striping=options.striping, rates=rates, block_bytes=block_bytes
    )
    transfers = RecordTransfers(
        paths=paths,
        versions=versions,
        placement=placement,
        rates=rates,
        block_bytes=block_bytes,
        alignment=alignment,
        describe=options.describe,
        is_superseded=lambda: read_only and commits.is_superseded(),
        advise=options.advise,
    )
    return StoreParts(
        paths=paths,
        versions=versions,
        transfers=transfers,
        room=Room(paths, versions=versions, placement=placement, block_bytes=block_bytes),
        commits=commits,
        rates=rates,
        block_bytes=block_bytes,
        alignment=alignment,
    )
