"""What a store consists of from open to close."""

from collections.abc import Callable
from dataclasses import dataclass

from offload.policy import Striping
from offload.storage.commits import Commits
from offload.storage.path_rates import PathRates
from offload.storage.placement import Placement
from offload.storage.record_transfers import RecordTransfers
from offload.storage.room import Room
from offload.storage.store_paths import OpenPath
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
        [path.engine.stats for path in paths],
        live_bytes=lambda index: versions.num_taken_on(index) * block_bytes,
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
    )
