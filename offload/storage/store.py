"""The copy-on-write block store: records in, records out, commits that survive `kill -9`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from offload.errors import StorageError, StoreError
from offload.policy import Striping, resolve_striping
from offload.sizes import MIB
from offload.storage.closing import close_parts
from offload.storage.commits import CommitReport
from offload.storage.data_file import data_file_name
from offload.storage.engine import Priority
from offload.storage.extents import Version
from offload.storage.manifest_files import require_checkpoint_name
from offload.storage.opening import find_store
from offload.storage.ownerships import Ownerships
from offload.storage.recovery import Recovery
from offload.storage.store_directories import take_new_directories
from offload.storage.store_options import LEAST_ALIGNMENT, StoreOptions
from offload.storage.store_parts import StoreParts, open_new
from offload.storage.store_paths import OpenPath, PathEngine, StorePath
from offload.storage.store_state import StoreState
from offload.storage.store_stats import BlockPlace, StoreStats
from offload.storage.tickets import StoreTicket


class BlockStore:
    """All blocks and manifests of one run, in one directory on each of its paths.

    A write goes to free blocks, a commit publishes the current versions, and a block that the
    newest published manifest or a checkpoint names is not reused: so a process killed at any
    instant leaves the last commit whole.

    Attributes:
        root: The directory on the first path.
        alignment: Of lengths (and, for direct files, addresses) in memory; known once open.
        durability: `commit`, or `none` without commits and syncs.

    Concurrency: Any thread. Commits are one at a time; writes may go on during one, and are part
        of it if their `wait` had returned when it began.
    """

    def __init__(
        self,
        root: Path | Sequence[StorePath],
        *,
        engine: PathEngine | Sequence[PathEngine],
        block_bytes: int = MIB,
        capacity_bytes: int | None = None,
        durability: Literal["commit", "none"] = "commit",
        describe: Callable[[str], str] | None = None,
        striping: Striping | None = None,
        advise: Callable[[], str] | None = None,
    ) -> None:
        """Stores its arguments.

        Args:
            root: Made by `create` if it is not there; or one directory for each path.
            engine: Open while the store is; not closed by it. One for each path, so that what
                each delivers is known, or one for all.
            block_bytes: A multiple of 4096.
            capacity_bytes: What the data file of `root` may have at most; None: all free space
                but a margin.
            durability: With `none` there are no commits and no syncs.
            describe: Gives what a record holds, for messages.
            striping: Which share of a record goes to which path; `adaptive` by default.
            advise: Says from which checkpoint a run can go on, for messages.
        """
        if isinstance(root, str | Path):
            paths = [StorePath(root=Path(root), capacity_bytes=capacity_bytes)]
        else:
            paths = list(root)
        self._options = StoreOptions(
            paths=tuple(paths),
            engines=tuple(engine) if isinstance(engine, Sequence) else (engine,),
            block_bytes=block_bytes,
            striping=striping or resolve_striping("adaptive"),
            describe=describe,
            advise=advise or (lambda: ""),
        )
        self.root = self._options.root
        self.alignment = LEAST_ALIGNMENT
        self.durability = durability
        self._state = StoreState.CLOSED
        self._ownerships = Ownerships()
        self._parts: StoreParts | None = None
        self._made: list[Path] | None = None
        """The directories that `create` made; None for a store that was opened."""

    @property
    def roots(self) -> list[Path]:
        """The directories by path: as configured, and once open all that the store has."""
        if self._parts is not None:
            return [path.root for path in self._parts.paths]
        return self._options.roots

    @property
    def block_bytes(self) -> int:
        """Unit of allocation and checksums; an existing store keeps its own."""
        return self._options.block_bytes

    @property
    def store_id(self) -> str:
        """The same in all its manifests, and no other store's."""
        return self._open_parts.commits.store_id

    @property
    def data_path(self) -> Path:
        """The data file on the first path."""
        return self.root / data_file_name(0)

    # Opening and closing.

    def create(self) -> None:
        """Makes an empty store and owns it.

        Each directory must be absent, empty, or what a run left that ended before its first
        commit.

        Raises:
            StoreError: Something else is there, or another process owns it.
        """
        self._require(StoreState.CLOSED, what="create")
        roots = self._options.roots
        made = [root for root in roots if not root.exists()]
        try:
            created_in = take_new_directories(roots, acquire=self._ownerships.acquire)
            self._use(open_new(self._options))
            self._open_parts.commits.start_empty(created_in)
        except BaseException:
            self.close()
            raise
        self._made = made
        self._state = StoreState.WRITABLE

    def open(self, *, read_only: bool = False) -> None:
        """Opens the newest complete commit and, unless `read_only`, owns the store.

        Directories that the store does not have yet become new paths of it. A path that is not
        asked for any more is still read and takes no new blocks.

        Raises:
            StoreError: There is no store or no commit, a newer `offload` wrote it, or another
                process owns it.
            CorruptStateError: No manifest is complete, or a data file lacks committed blocks.
        """
        wanted = StoreState.READ_ONLY if read_only else StoreState.WRITABLE
        if self._state is wanted:
            return
        self._require(StoreState.CLOSED, what="open")
        roots = self._options.roots
        found = find_store(roots)  # before anything is written where no store is
        try:
            refused: dict[Path, StorageError] = {}
            if not read_only:
                there = [root for root in found.roots if root is not None]
                refused = self._ownerships.acquire_writable(there)
                found = find_store(roots)
            recovery = Recovery(found, self._options, read_only=read_only, refused=refused)
            self._use(recovery.open(acquire=self._ownerships.acquire))
            recovery.load(self._open_parts)
        except BaseException:
            self.close()
            raise
        self._state = wanted

    def close(self) -> None:
        """Waits for transfers in flight and gives the store up; may be called again.

        What no commit published is lost. Of a store that nothing was written to nothing stays.
        """
        parts, self._parts = self._parts, None
        made, self._made = self._made, None
        self._state = StoreState.CLOSED
        close_parts(parts, self._ownerships, made=made)

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

    def block_place(self, record: str, block: int, *, checkpoint: str | None = None) -> BlockPlace:
        """Returns where block number `block` of a record, or of a checkpoint's, lies now."""
        return self._open_parts.block_place(record, block, checkpoint=checkpoint)

    def bytes_by_path(self, record: str) -> dict[Path, int]:
        """Returns the bytes of a record's blocks on each path that has some."""
        return self._open_parts.bytes_by_path(record)

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

    def write_staged(
        self, record: str, source: memoryview, *, num_bytes: int | None = None
    ) -> StoreTicket:
        """As `write`, but the version becomes current with `publish_staged` only.

        A staged version is part of no commit, and ends with the store.
        """
        self._require(StoreState.WRITABLE, what="write to")
        return self._open_parts.transfers.write(
            record, source, num_bytes=num_bytes, priority=Priority.WRITE_BACK, is_staged=True
        )

    def publish_staged(self, records: Iterable[str]) -> None:
        """Makes the staged versions of these records current, unless newer ones were written."""
        self._require(StoreState.WRITABLE, what="publish in")
        self._open_parts.versions.publish_staged(records)

    def drop_staged(self, records: Iterable[str]) -> None:
        """Gives the staged versions of these records up; their blocks are free again."""
        self._require(StoreState.WRITABLE, what="discard from")
        self._open_parts.versions.drop_staged(records)

    def read(
        self,
        record: str,
        into: memoryview,
        *,
        offset: int = 0,
        num_bytes: int | None = None,
        priority: Priority = Priority.NEEDED,
        checkpoint: str | None = None,
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
            checkpoint: Reads the version that a checkpoint keeps.

        Raises:
            StoreError: There is no such record. From `wait`, of a read-only store: its owner has
                committed since and reused blocks.

        Ownership: `into` belongs to the store until `wait` has returned.
        """
        return self._open_parts.transfers.read(
            record,
            into,
            offset=offset,
            num_bytes=num_bytes,
            priority=priority,
            checkpoint=checkpoint,
        )

    def require_room(
        self, groups: Sequence[Mapping[str, int]], *, num_in_flight: int, what: str
    ) -> None:
        """Makes sure that new versions of records fit, before the first of them is written.

        Args:
            groups: Bytes by record, of the records that are written together.
            num_in_flight: The most groups that are written at one time.
            what: Is about to be done, for the message.

        Raises:
            StorageError: They do not fit beside the last commit, the current versions and the
                checkpoints; nothing was changed. `errno` is ENOSPC.
        """
        self._require(StoreState.WRITABLE, what=what)
        self._open_parts.room.require(groups, num_in_flight=num_in_flight, what=what)

    def spill_room(self, root: Path) -> OpenPath | None:
        """Returns the path at `root`, which counts what is spilled beside its data file."""
        return next((path for path in self._open_parts.paths if path.root == root), None)

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

        In this order: sync the data files, sync directories in which files were made, write the
        manifest under a temporary name on each path, and on one path after the other sync it,
        rename it, sync the directory; then, and only then, blocks of older versions may be reused.

        Args:
            head: Whatever JSON can express; `schema` and `committed_at` are added.

        Raises:
            ConfigError: JSON cannot express `head`, or it has one of the added keys.
            StorageError: The manifest could not be written (nothing is published; the commit may
                be tried again), or a sync failed, which is final: no further commit is accepted.
            StoreError: An earlier sync failed, or the store has durability `none`.
        """
        self._require(StoreState.WRITABLE, what="commit to")
        if self.durability == "none":
            raise StoreError(
                f"cannot commit to store `{self.root}`: expected durability `commit`, found "
                "`none`; set `tiers.storage.durability`"
            )
        return self._open_parts.commits.commit(head)

    # Checkpoints: commits with a name, which keep their blocks.

    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """Returns the head of each checkpoint by name, oldest first."""
        return self._open_parts.commits.checkpoint_heads()

    def save(self, name: str) -> None:
        """Names the last commit; an older checkpoint of that name is replaced. Copies no block.

        Raises:
            ConfigError: The name has other characters than letters, digits and `._+-`.
            StoreError: There is no commit yet.
            StorageError: As from `commit`.
        """
        self._require(StoreState.WRITABLE, what="save a checkpoint in")
        require_checkpoint_name(name)
        self._open_parts.commits.save(name)

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint, whose blocks become free.

        Raises:
            StoreError: There is none of that name.
            StorageError: It could not be deleted everywhere: its blocks are kept.
        """
        self._require(StoreState.WRITABLE, what="delete a checkpoint of")
        self._open_parts.commits.delete_checkpoint(name)

    def load(self, name: str) -> dict[str, Any]:
        """Makes the versions of a checkpoint current and returns its head.

        The last commit stays what a restart finds until the next one.

        Raises:
            StoreError: There is none of that name.
        """
        return self._open_parts.load(name)

    def checkpoint_records(self, name: str) -> dict[str, Version]:
        """Returns what a checkpoint keeps, by record name."""
        return self._open_parts.versions.checkpoint(name)

    def current_records(self) -> dict[str, Version]:
        """Returns the current versions by record name."""
        parts = self._open_parts
        return {record: parts.versions.current(record) for record in parts.versions.records()}

    def stats(self) -> StoreStats:
        """Returns the counters."""
        return self._open_parts.stats()

    def _use(self, parts: StoreParts) -> None:
        self._parts = parts
        self._options = replace(self._options, block_bytes=parts.block_bytes)
        self.alignment = parts.alignment

    @property
    def _open_parts(self) -> StoreParts:
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
