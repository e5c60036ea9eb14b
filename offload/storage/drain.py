"""Copying checkpoints to another directory in the background.

[Note: complete or invisible] A copy is a store of its own. It is made under a name that ends in
`.partial`; records arrive there in any number of commits, each of which a restart goes on from, and
when the last has been committed the directory is renamed. So a copy that has its name is whole.
"""

import logging
import mmap
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from offload.errors import CorruptStateError, OffloadError, StorageError
from offload.sizes import GIB, format_size, round_up
from offload.storage.engine import Engine, Priority
from offload.storage.extents import Version
from offload.storage.manifest_files import sync_directory
from offload.storage.opening import find_store, has_commit
from offload.storage.paced_engine import PacedEngine
from offload.storage.store import BlockStore

_log = logging.getLogger("offload.storage")

_PARTIAL = ".partial"
_COMMIT_BYTES = GIB
"""How much of a copy at most is made again after an interruption."""
_KEY = "drained_from"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedCopy:
    """A complete copy of a checkpoint."""

    root: Path
    """A store, to be opened like any other."""
    name: str
    store_id: str
    saved_at: float
    """When the checkpoint was committed; Unix time in seconds."""
    step: int | None


class Drain:
    """Copies checkpoints of an open store, one after the other, on a thread of its own.

    Reads have the lowest priority of all transfers. Outside budgets it needs the memory of the
    largest record, once.

    Concurrency: Any thread. `close` ends the copy in progress where it is; it is gone on with
        when it is asked for again.
    """

    def __init__(
        self, store: BlockStore, *, target: Path, bytes_per_s: int | None = None, keep_last: int = 0
    ) -> None:
        """Stores its arguments.

        Args:
            store: Open until `close` has returned.
            target: Made if it is not there.
            bytes_per_s: The most that are written there.
            keep_last: Older complete copies of this store are deleted; 0 keeps all.
        """
        self._store = store
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._keep_last = keep_last
        self._changed = threading.Condition()  # over what follows
        self._queue: deque[str] = deque()
        self._current: str | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.failures: list[str] = []
        """One line for each checkpoint that could not be copied."""

    def start(self, name: str) -> None:
        """Begins to copy a checkpoint, after those asked for before."""
        with self._changed:
            self._queue.append(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offload-drain", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def start_unfinished(self) -> None:
        """Begins to copy the checkpoints whose copies were interrupted."""
        for name in self._store.checkpoints():
            if self._path_of(name, partial=True).is_dir():
                self.start(name)

    def is_draining(self, name: str) -> bool:
        """Returns whether a checkpoint is being copied, or is to be."""
        with self._changed:
            return name == self._current or name in self._queue

    def wait(self) -> None:
        """Waits until nothing is left to copy."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and self._current is None)

    def close(self) -> None:
        """Ends the copy in progress; again does nothing."""
        with self._changed:
            self._is_closing = True
            self._queue.clear()
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._is_closing = False

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._queue)
                if self._is_closing:
                    return
                self._current = self._queue.popleft()
            try:
                self._drain(self._current)
            except Exception as error:  # noqa: BLE001 - whoever waits would wait for ever
                self.failures.append(f"checkpoint `{self._current}`: {error}")
                _log.warning(
                    "checkpoint `%s` could not be copied to `%s`: %s; training goes on",
                    self._current,
                    self._target,
                    error,
                    exc_info=not isinstance(error, OffloadError | OSError),
                )
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _drain(self, name: str) -> None:
        final, partial = self._path_of(name), self._path_of(name, partial=True)
        head = self._store.checkpoints().get(name)
        if head is None or final.exists():
            return
        engine = Engine() if self._bytes_per_s is None else _paced(self._bytes_per_s)
        with engine:
            copy = BlockStore(partial, engine=engine, block_bytes=self._store.block_bytes)
            try:
                copy.open() if has_commit(partial) else copy.create()
                whole = self._copy(name, copy, head)
            finally:
                copy.close()
        if not whole:
            return
        try:
            partial.rename(final)
        except OSError as error:
            raise StorageError(
                f"cannot name the copy `{partial}`: expected to rename it to `{final}`, found "
                f"{error.strerror}; rename it by hand",
                errno=error.errno,
            ) from error
        sync_directory(self._target)
        _log.info("checkpoint `%s` is copied to `%s`", name, final)
        self._delete_older()

    def _copy(self, name: str, copy: BlockStore, head: Mapping[str, Any]) -> bool:
        """Returns whether everything is copied and committed; False: it was told to end."""
        wanted = self._store.checkpoint_records(name)
        kept = copy.current_records()
        largest = max((version.num_bytes for version in wanted.values()), default=0)
        memory = memoryview(mmap.mmap(-1, max(round_up(largest, copy.alignment), mmap.PAGESIZE)))
        since_commit = 0
        for record, version in wanted.items():
            if record in kept and _is_same(kept[record], version):
                continue
            if self._is_closing:
                copy.commit({_KEY: self._origin(name, head), "is_partial": True})
                return False
            self._copy_record(name, record, version, copy, memory)
            since_commit += version.num_bytes
            if since_commit >= _COMMIT_BYTES:
                copy.commit({_KEY: self._origin(name, head), "is_partial": True})
                since_commit = 0
        for record in kept.keys() - wanted.keys():
            copy.discard(record)
        given = {k: v for k, v in head.items() if k not in ("schema", "committed_at")}
        copy.commit({**given, _KEY: self._origin(name, head)})
        return True

    def _copy_record(
        self, name: str, record: str, version: Version, copy: BlockStore, memory: memoryview
    ) -> None:
        part = memory[: round_up(version.num_bytes, copy.alignment)]
        self._store.read(record, part, checkpoint=name, priority=Priority.WRITE_BACK).wait()
        copy.write(record, part, num_bytes=version.num_bytes).wait()

    def _origin(self, name: str, head: Mapping[str, Any]) -> dict[str, Any]:
        return {"store": self._store.store_id, "name": name, "saved_at": head["committed_at"]}

    def _path_of(self, name: str, *, partial: bool = False) -> Path:
        tag = self._store.store_id[:8]
        return self._target / f"{name}-{tag}{_PARTIAL if partial else ''}"

    def _delete_older(self) -> None:
        if not self._keep_last:
            return
        own = [c for c in drained_copies(self._target) if c.store_id == self._store.store_id]
        for copy in own[: -self._keep_last]:
            _log.info("copy `%s` is deleted: %d newer ones are kept", copy.root, self._keep_last)
            rmtree(copy.root, ignore_errors=True)


def drained_copies(target: Path) -> list[DrainedCopy]:
    """Returns the complete copies in a directory, of any store, oldest first."""
    if not target.is_dir():
        return []
    found = []
    for root in sorted(target.iterdir()):
        if root.name.endswith(_PARTIAL) or not root.is_dir():
            continue
        try:
            head = find_store([root]).manifest.head
        except OffloadError:
            continue  # something else, or damaged: `offload verify` says more
        origin = head.get(_KEY)
        if isinstance(origin, dict):
            found.append(
                DrainedCopy(
                    root=root,
                    name=str(origin.get("name")),
                    store_id=str(origin.get("store")),
                    saved_at=float(origin.get("saved_at", 0)),
                    step=head.get("step"),
                )
            )
    return sorted(found, key=lambda copy: copy.saved_at)


def copy_store(source: BlockStore, target: BlockStore) -> int:
    """Copies the current records of an open store into a new one and commits; returns the bytes.

    Raises:
        CorruptStateError: Something read differs from what was written.
        StorageError: The target has no room.
    """
    head = source.head
    if head is None:
        raise CorruptStateError(f"store `{source.root}` has no commit to copy; name another")
    records = source.current_records()
    largest = max((version.num_bytes for version in records.values()), default=0)
    alignment = max(source.alignment, target.alignment)
    memory = memoryview(mmap.mmap(-1, max(round_up(largest, alignment), mmap.PAGESIZE)))
    for record, version in records.items():
        part = memory[: round_up(version.num_bytes, alignment)]
        source.read(record, part).wait()
        target.write(record, part, num_bytes=version.num_bytes).wait()
    target.commit({k: v for k, v in head.items() if k not in ("schema", "committed_at", _KEY)})
    num_bytes = sum(version.num_bytes for version in records.values())
    _log.info("%s copied from `%s`", format_size(num_bytes), source.root)
    return num_bytes


def _is_same(left: Version, right: Version) -> bool:
    return left.num_bytes == right.num_bytes and left.checksums == right.checksums


def _paced(bytes_per_s: int) -> PacedEngine:
    return PacedEngine(Engine(), bytes_per_s=bytes_per_s)
