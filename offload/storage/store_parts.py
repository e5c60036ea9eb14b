"""What a store consists of from open to close."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.policy import Striping
from offload.storage.commits import Commits
from offload.storage.data_file import data_file_name
from offload.storage.path_rates import PathRates
from offload.storage.placement import Placement
from offload.storage.record_transfers import RecordTransfers
from offload.storage.room import Room
from offload.storage.store_paths import OpenPath
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


def make_parts(
    paths: list[OpenPath],
    *,
    store_id: str,
    block_bytes: int,
    alignment: int,
    striping: Striping,
    describe: Callable[[str], str] | None,
    advise: Callable[[], str],
    read_only: bool,
) -> StoreParts:
    """Returns the parts of a store over open paths, with nothing in it yet."""
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
        paths, versions=versions, striping=striping, rates=rates, block_bytes=block_bytes
    )
    transfers = RecordTransfers(
        paths=paths,
        versions=versions,
        placement=placement,
        rates=rates,
        block_bytes=block_bytes,
        alignment=alignment,
        describe=describe,
        is_superseded=lambda: read_only and commits.is_superseded(),
        advise=advise,
    )
    return StoreParts(
        paths=paths,
        versions=versions,
        transfers=transfers,
        room=Room(paths, versions=versions, placement=placement, block_bytes=block_bytes),
        commits=commits,
        rates=rates,
        block_bytes=block_bytes,
    )
