"""The copy-on-write block store: records in, records out, commits that survive `kill -9`."""

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offload.errors import ConfigError, CorruptStateError, StoreError
from offload.sizes import MIB, format_size
from offload.storage.commits import CommitReport, Commits
from offload.storage.data_file import DataFile, data_file_name
from offload.storage.engine import Engine, Priority
from offload.storage.manifest import Manifest
from offload.storage.manifest_files import (
    ManifestFiles,
    is_manifest_name,
    read_newest_manifest,
)
from offload.storage.ownership import OWNER_FILE, Ownership
from offload.storage.record_transfers import RecordTransfers
from offload.storage.tickets import StoreTicket
from offload.storage.versions import VersionTable

_log = logging.getLogger("offload.storage")

_LEAST_ALIGNMENT = 4096
_PATH_INDEX = 0


class StoreState(enum.Enum):
    """What may be asked of a store."""

    CLOSED = "closed"
    """No file is open; `create` or `open` comes next."""
    WRITABLE = "open for writing"
    """This process owns the directory."""
    READ_ONLY = "open for reading"
    """Nothing is owned; another process may own the directory and rewrite blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Cumulative counters since the store was opened, and its size now."""

    read_bytes: int
    """Of records, padding included."""
    write_bytes: int
    """Of records, padding included."""
    commit_bytes: int
    """Of manifests."""
    live_bytes: int
    """In blocks that a version, committed or current, or a reader needs."""
    file_bytes: int
    """Of the data file, free blocks included."""


class BlockStore:
    """All blocks and manifests of one run, in one directory.

    A write goes to free blocks, a commit publishes the current versions, and a block that the
    newest published manifest names is not reused before the next one is published: so a process
    killed at any instant leaves the last commit whole.

    Attributes:
        root: The directory.
        data_path: The data file.
        block_bytes: Unit of allocation and checksums; an existing store keeps its own.
        alignment: Of lengths (and, for direct files, addresses) in memory; known once open.

    Concurrency: Any thread. Commits are one at a time; writes may go on during one, and are part
        of it if their `wait` had returned when it began.
    """

    def __init__(
        self,
        root: Path,
        *,
        engine: Engine,
        block_bytes: int = MIB,
        capacity_bytes: int | None = None,
        durability: Literal["commit", "none"] = "commit",
        describe: Callable[[str], str] | None = None,
    ) -> None:
        """Stores its arguments.

        Args:
            root: Made by `create` if it is not there.
            engine: Open while the store is; not closed by it.
            block_bytes: A multiple of 4096.
            capacity_bytes: What the data file may have at most; None: the file system decides.
            durability: With `none` there are no commits and no syncs.
            describe: Gives what a record holds, for messages.
        """
        if block_bytes <= 0 or block_bytes % _LEAST_ALIGNMENT:
            raise ConfigError(
                f"cannot make store `{root}` with blocks of {block_bytes} bytes: expected a "
                f"multiple of {_LEAST_ALIGNMENT}; use the default of {format_size(MIB)}"
            )
        self.root = Path(root)
        self.data_path = self.root / data_file_name(_PATH_INDEX)
        self.block_bytes = block_bytes
        self.alignment = _LEAST_ALIGNMENT
        self._engine = engine
        self._capacity_bytes = capacity_bytes
        self._durability = durability
        self._describe = describe
        self._state = StoreState.CLOSED
        self._ownership = Ownership(self.root)
        self._parts: _Parts | None = None

    # Opening and closing.

    def create(self) -> None:
        """Makes an empty store and owns it.

        `root` must be absent, empty, or what a run left that ended before its first commit.

        Raises:
            StoreError: Something else is there, or another process owns it.
        """
        self._require(StoreState.CLOSED, what="create")
        self._check_replaceable()
        created_in = (self.root, *_make_directories(self.root))
        try:
            self._ownership.acquire()
            self._check_replaceable()  # it may have changed before the store was owned
            self._delete_leftovers()
            self._start(create=True)
            self._open_parts.commits.start_empty(created_in)
        except BaseException:
            self.close()
            raise
        self._state = StoreState.WRITABLE

    def open(self, *, read_only: bool = False) -> None:
        """Opens the newest complete commit and, unless `read_only`, owns the store.

        Raises:
            StoreError: There is no store or no commit, a newer `offload` wrote it, or another
                process owns it.
            CorruptStateError: No manifest is complete, or the data file lacks committed blocks.
        """
        wanted = StoreState.READ_ONLY if read_only else StoreState.WRITABLE
        if self._state is wanted:
            return
        self._require(StoreState.CLOSED, what="open")
        read_newest_manifest(self.root)  # before anything is written where no store is
        try:
            if not read_only:
                self._ownership.acquire()
                ManifestFiles(self.root).delete_temporaries()
            self._recover(read_newest_manifest(self.root), read_only=read_only)
        except BaseException:
            self.close()
            raise
        self._state = wanted

    def close(self) -> None:
        """Waits for transfers in flight and gives the store up; may be called again.

        What no commit published is lost.
        """
        parts, self._parts = self._parts, None
        self._state = StoreState.CLOSED
        try:
            if parts is not None:
                parts.transfers.wait_all()
                parts.data.close()
        finally:
            self._ownership.release()

    # Records.

    def __contains__(self, record: str) -> bool:
        return record in self._open_parts.versions

    def records(self) -> list[str]:
        """Returns the names of the current records in code-point order."""
        return self._open_parts.versions.records()

    def num_bytes(self, record: str) -> int:
        """Returns the bytes in use of the current version of a record.

        Raises:
            StoreError: There is no such record.
        """
        return self._open_parts.versions.current(record).num_bytes

    def block_offset(self, record: str, block: int) -> int:
        """Returns where in the data file block number `block` of a record is now."""
        at = block
        for extent in self._open_parts.versions.current(record).extents:
            if at < extent.num_blocks:
                return (extent.first_block + at) * self.block_bytes
            at -= extent.num_blocks
        raise ConfigError(
            f"record `{record}` has no block {block}: expected one of its {block - at}; "
            "ask for a block within it"
        )

    def write(
        self,
        record: str,
        source: memoryview,
        *,
        num_bytes: int | None = None,
        priority: Priority = Priority.WRITE_BACK,
    ) -> StoreTicket:
        """Starts writing a new version of a record into free blocks.

        The version is current once the ticket's `wait` has returned; until then, and if the
        write fails, the one before it is.

        Args:
            record: Any name that UTF-8 can express.
            source: Contiguous; its length is a multiple of `alignment`.
            num_bytes: Bytes in use, at most `len(source)`, which is the default. Checksums cover
                these; what follows up to the alignment is written as it is.
            priority: Among the engine's transfers.

        Raises:
            StorageError: No free block and no room for more: `errno` is ENOSPC or EDQUOT.

        Ownership: `source` belongs to the store, and does not change, until `wait` has returned.
        Concurrency: Blocks are hashed here, while the transfers run.
        """
        self._require(StoreState.WRITABLE, what="write to")
        return self._open_parts.transfers.write(
            record, source, num_bytes=num_bytes, priority=priority
        )

    def read(
        self,
        record: str,
        into: memoryview,
        *,
        offset: int = 0,
        num_bytes: int | None = None,
        priority: Priority = Priority.NEEDED,
    ) -> StoreTicket:
        """Starts reading the current version of a record; `wait` verifies each block.

        A later write of the record does not disturb the read.

        Args:
            record: Its name.
            into: Contiguous; its length is a multiple of `alignment`. Bytes behind the wanted
                ones, up to the alignment, are overwritten with padding.
            offset: First byte, a multiple of `block_bytes`.
            num_bytes: To the record's end by default; else whole blocks.
            priority: Among the engine's transfers.

        Raises:
            StoreError: There is no such record. From `wait`, of a read-only store: its owner has
                committed since and reused blocks.

        Ownership: `into` belongs to the store until `wait` has returned.
        """
        return self._open_parts.transfers.read(
            record, into, offset=offset, num_bytes=num_bytes, priority=priority
        )

    def discard(self, record: str) -> None:
        """Drops a record from the current versions, if it is there. The last commit keeps it."""
        self._require(StoreState.WRITABLE, what="discard from")
        self._open_parts.versions.discard(record)

    # Commits.

    @property
    def head(self) -> dict[str, Any] | None:
        """JSON head of the newest manifest, a fresh copy; None before the first commit.

        What `commit` was given, `schema`, and `committed_at` (Unix time in seconds).
        """
        return self._open_parts.commits.head

    def commit(self, head: Mapping[str, object]) -> CommitReport:
        """Makes the current versions, with `head`, what a restart finds.

        In this order: sync the data file, sync directories in which files were made, write the
        manifest under a temporary name, sync it, rename it, sync the directory; then, and only
        then, blocks of older versions may be reused.

        Args:
            head: Whatever JSON can express; `schema` and `committed_at` are added.

        Raises:
            ConfigError: JSON cannot express `head`, or it has one of the added keys.
            StorageError: The manifest could not be written (nothing is published; the commit may
                be tried again), or a sync failed, which is final: no further commit is accepted.
            StoreError: An earlier sync failed, or the store has durability `none`.
        """
        self._require(StoreState.WRITABLE, what="commit to")
        if self._durability == "none":
            raise StoreError(
                f"cannot commit to store `{self.root}`: expected durability `commit`, found "
                "`none`; set `tiers.storage.durability`"
            )
        return self._open_parts.commits.commit(head)

    def stats(self) -> StoreStats:
        """Returns the counters."""
        parts = self._open_parts
        return StoreStats(
            read_bytes=parts.transfers.read_bytes,
            write_bytes=parts.transfers.write_bytes,
            commit_bytes=parts.commits.commit_bytes,
            live_bytes=parts.versions.num_taken_blocks * self.block_bytes,
            file_bytes=parts.versions.num_blocks * self.block_bytes,
        )

    # Steps of opening.

    def _recover(self, manifest: Manifest, *, read_only: bool) -> None:
        if manifest.block_bytes != self.block_bytes:
            _log.warning(
                "store `%s` keeps its blocks of %s; %s was asked for and applies to new stores",
                self.root,
                format_size(manifest.block_bytes),
                format_size(self.block_bytes),
            )
            self.block_bytes = manifest.block_bytes
        self._start(read_only=read_only)
        parts = self._open_parts
        if read_only:  # what is missing shows when it is read, so that all else can be
            parts.versions.grow(_end_block(manifest))
        else:
            self._check_not_truncated(manifest, parts.data.num_blocks())
        parts.versions.load(manifest.records)
        parts.commits.start_after(manifest.sequence, manifest.head)

    def _start(self, *, create: bool = False, read_only: bool = False) -> None:
        data = DataFile(self.root, path_index=_PATH_INDEX, block_bytes=self.block_bytes)
        data.open(create=create, read_only=read_only)
        self.alignment = max(_LEAST_ALIGNMENT, data.file.alignment)
        versions = VersionTable(block_bytes=self.block_bytes, num_blocks=data.num_blocks())
        commits = Commits(
            self.root,
            engine=self._engine,
            data=data,
            versions=versions,
            block_bytes=self.block_bytes,
        )
        self._parts = _Parts(
            data=data,
            versions=versions,
            transfers=RecordTransfers(
                engine=self._engine,
                data=data,
                versions=versions,
                block_bytes=self.block_bytes,
                alignment=self.alignment,
                capacity_bytes=self._capacity_bytes,
                describe=self._describe,
                is_superseded=lambda: read_only and commits.is_superseded(),
            ),
            commits=commits,
        )
        if self.block_bytes % self.alignment:
            raise StoreError(
                f"cannot use store `{self.root}` on this device: expected blocks that are "
                f"multiples of its alignment of {self.alignment} bytes, found "
                f"{self.block_bytes}; use larger blocks"
            )

    def _check_not_truncated(self, manifest: Manifest, num_blocks: int) -> None:
        for record, version in manifest.records.items():
            for extent in version.extents:
                if extent.end_block > num_blocks:
                    what = f" ({self._describe(record)})" if self._describe else ""
                    raise CorruptStateError(
                        f"record `{record}`{what} is damaged: file `{self.data_path}` is "
                        f"truncated: expected at least {extent.end_block * self.block_bytes} "
                        f"bytes, found {num_blocks * self.block_bytes} in whole blocks; restore "
                        "the file from a copy or resume from another checkpoint"
                    )

    def _check_replaceable(self) -> None:
        """Checks that nothing in `root` is worth keeping or another's."""
        try:
            names = sorted(path.name for path in self.root.iterdir())
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            raise self._not_replaceable("a file") from error
        if ManifestFiles(self.root).sequences():
            raise StoreError(
                f"cannot create store `{self.root}`: expected no commit there, found one; "
                "open it (resume), or use another directory"
            )
        foreign = [name for name in names if not self._is_own(name)]
        if foreign or (names and OWNER_FILE not in names):
            raise self._not_replaceable(f"`{(foreign or names)[0]}`")

    def _not_replaceable(self, found: str) -> StoreError:
        return StoreError(
            f"cannot create store `{self.root}`: expected no such directory, an empty one, or a "
            f"store without a commit, found {found}; use another directory"
        )

    @staticmethod
    def _is_own(name: str) -> bool:
        return name in (OWNER_FILE, data_file_name(_PATH_INDEX)) or is_manifest_name(name)

    def _delete_leftovers(self) -> None:
        """Deletes what a run left that ended before its first commit."""
        ManifestFiles(self.root).delete_temporaries()
        self.data_path.unlink(missing_ok=True)

    @property
    def _open_parts(self) -> "_Parts":
        if self._parts is None:
            raise StoreError(
                f"store `{self.root}` is closed: expected it to be open; call `open` or `create`"
            )
        return self._parts

    def _require(self, state: StoreState, *, what: str) -> None:
        if self._state is not state:
            raise StoreError(
                f"cannot {what} store `{self.root}`: expected it to be {state.value}, found it "
                f"{self._state.value}; call `create`, `open` or `close` first"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a store has from open to close."""

    data: DataFile
    versions: VersionTable
    transfers: RecordTransfers
    commits: Commits


def _make_directories(root: Path) -> tuple[Path, ...]:
    """Makes `root` and what is missing above it; returns the directories made anew in."""
    missing = []
    at = root.absolute()
    while not at.exists():
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
    return tuple(directory.parent for directory in missing)


def _end_block(manifest: Manifest) -> int:
    return max(
        (extent.end_block for version in manifest.records.values() for extent in version.extents),
        default=0,
    )
