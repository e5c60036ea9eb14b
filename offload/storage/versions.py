"""Which versions of records a store has, and which blocks they keep.

[Note: who keeps blocks] A version's blocks are free when nothing needs them: it is not current,
the newest published manifest does not name it, no checkpoint does, nobody reads it and its write is
over. Each of these is one reference. Superseding a version therefore frees its blocks at once if no
commit published it, and otherwise when the next commit has been published.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

from offload.errors import CorruptStateError, StoreError
from offload.storage.allocator import BlockAllocator
from offload.storage.extents import Extent, Version, num_blocks_for


class VersionTable:
    """Current, committed and kept versions by record name, over the blocks of all paths.

    Decides only: no file is touched here.

    Concurrency: Any thread; a lock is held for short, pure work.
    """

    def __init__(self, *, block_bytes: int, num_blocks: Sequence[int]) -> None:
        """Stores its arguments.

        Args:
            block_bytes: Of the store.
            num_blocks: That the data file of each path has now.
        """
        self._lock = threading.Lock()
        self._block_bytes = block_bytes
        self._allocators = [
            BlockAllocator(path_index=index, num_blocks=count)
            for index, count in enumerate(num_blocks)
        ]
        self._staged: dict[str, Version] = {}
        self._current: dict[str, Version] = {}
        self._committed: dict[str, Version] = {}
        self._checkpoints: dict[str, dict[str, Version]] = {}
        self._newest_serial: dict[str, int] = {}  # what was last written to or said of a record
        self._next_serial = 1

    def load(self, records: Mapping[str, Version]) -> None:
        """Makes the versions of a manifest current and committed."""
        with self._lock:
            for version in records.values():
                self._take(version)
                version.references += 2
            self._current = dict(records)
            self._committed = dict(records)

    def load_checkpoint(self, name: str, records: Mapping[str, Version]) -> None:
        """Keeps the versions of a checkpoint; call it after `load`.

        Raises:
            CorruptStateError: It claims blocks that another version has; nothing is kept for it.
        """
        with self._lock:
            known = {
                (record, version.num_bytes, version.extents): version
                for versions in (self._committed, *self._checkpoints.values())
                for record, version in versions.items()
            }
            kept: dict[str, Version] = {}
            for record, version in records.items():
                same = known.get((record, version.num_bytes, version.extents), version)
                try:
                    if same is version:
                        self._take(version)
                except StoreError as error:
                    for taken in kept.values():
                        self._drop_reference(taken)
                    raise CorruptStateError(
                        f"checkpoint `{name}` is damaged: record `{record}` claims blocks that "
                        "another version has; load another checkpoint"
                    ) from error
                same.references += 1
                kept[record] = same
            self._checkpoints[name] = kept

    # What the store holds.

    def records(self) -> list[str]:
        with self._lock:
            return sorted(self._current)

    def __contains__(self, record: str) -> bool:
        with self._lock:
            return record in self._current

    def current(self, record: str) -> Version:
        """Returns the current version, whose blocks stay only as long as it is current.

        Raises:
            StoreError: There is none.
        """
        with self._lock:
            return self._require(record, self._current)

    def checkpoint(self, name: str) -> dict[str, Version]:
        """Returns the versions of a checkpoint, whose blocks stay until it is dropped.

        Raises:
            StoreError: There is no such checkpoint.
        """
        with self._lock:
            return dict(self._require_checkpoint(name))

    @property
    def num_blocks(self) -> int:
        return sum(allocator.num_blocks for allocator in self._allocators)

    @property
    def num_taken_blocks(self) -> int:
        return sum(allocator.num_taken for allocator in self._allocators)

    def num_taken_on(self, path_index: int) -> int:
        return self._allocators[path_index].num_taken

    def lost_with(self, path_index: int) -> list[str]:
        """Returns the current records of which something lies on a path."""
        with self._lock:
            return sorted(
                record
                for record, version in self._current.items()
                if any(extent.path_index == path_index for extent in version.extents)
            )

    # Writing: a version is allocated, then published or released.

    def num_free_on(self, path_index: int) -> int:
        """Returns how many blocks of a path's data file are free."""
        with self._lock:
            return self._allocators[path_index].num_free

    def num_lasting(self, sizes: Mapping[str, int]) -> int:
        """Returns the blocks that new versions of these records take beside what is kept.

        Those of records whose current version nothing else needs are not counted: it gives way.

        Args:
            sizes: Bytes by record.
        """
        with self._lock:
            return sum(
                num_blocks_for(num_bytes, self._block_bytes)
                for record, num_bytes in sizes.items()
                if (version := self._current.get(record)) is None or self._is_kept(record, version)
            )

    def kept(self) -> list[str]:
        """Returns the names of the checkpoints."""
        with self._lock:
            return sorted(self._checkpoints)

    def num_kept_only_by(self, checkpoint: str) -> int:
        """Returns how many blocks would be free without a checkpoint."""
        with self._lock:
            kept = self._require_checkpoint(checkpoint).values()
            return sum(version.num_blocks for version in kept if version.references == 1)

    def grow(self, path_index: int, num_blocks: int) -> None:
        """Says that the data file of a path now has `num_blocks` blocks."""
        with self._lock:
            self._allocators[path_index].grow(num_blocks)

    def try_allocate(self, num_bytes: int, counts: Sequence[int]) -> Version | None:
        """Returns a new version in blocks that nothing needs, None where too few are free.

        Args:
            num_bytes: Of the version.
            counts: Its blocks by path.
        """
        assert sum(counts) == num_blocks_for(num_bytes, self._block_bytes)
        with self._lock:
            extents: list[Extent] = []
            for allocator, count in zip(self._allocators, counts, strict=True):
                taken = allocator.try_take(count)
                if taken is None:
                    self._release(extents)
                    return None
                extents.extend(taken)
            version = Version(
                num_bytes=num_bytes, extents=tuple(extents), serial=self._next_serial, references=1
            )
            self._next_serial += 1
            return version

    def publish(self, record: str, version: Version) -> None:
        """Makes a written version current, unless something newer was said of the record."""
        with self._lock:
            if version.serial < self._newest_serial.get(record, 0):
                self._drop_reference(version)
                return
            self._newest_serial[record] = version.serial
            superseded = self._current.get(record)
            self._current[record] = version  # the writer's reference becomes this one
            if superseded is not None:
                self._drop_reference(superseded)

    def stage(self, record: str, version: Version) -> None:
        """Keeps a written version that becomes current later, or never."""
        with self._lock:
            superseded = self._staged.get(record)
            self._staged[record] = version
            if superseded is not None:
                self._drop_reference(superseded)

    def publish_staged(self, records: Iterable[str]) -> None:
        """Makes the staged versions of these records current, where there are some."""
        for record in records:
            with self._lock:
                version = self._staged.pop(record, None)
            if version is not None:
                self.publish(record, version)

    def drop_staged(self, records: Iterable[str]) -> None:
        """Gives the staged versions of these records up."""
        for record in records:
            with self._lock:
                version = self._staged.pop(record, None)
            if version is not None:
                self.release(version)

    def discard(self, record: str) -> None:
        """Drops the record from the current versions; a write in flight does not revive it."""
        with self._lock:
            self._supersede(record)
            version = self._current.pop(record, None)
            if version is not None:
                self._drop_reference(version)

    # Reading.

    def hold(self, record: str, *, checkpoint: str | None = None) -> Version:
        """Returns the current version, or a checkpoint's; its blocks stay until `release`.

        Raises:
            StoreError: There is none.
        """
        with self._lock:
            among = self._current if checkpoint is None else self._require_checkpoint(checkpoint)
            version = self._require(record, among)
            version.references += 1
            return version

    def release(self, version: Version) -> None:
        """Ends a `hold`, or gives up a version whose write failed."""
        with self._lock:
            self._drop_reference(version)

    # Committing.

    def begin_commit(self) -> dict[str, Version]:
        """Returns the current versions, whose blocks stay until the commit is decided."""
        with self._lock:
            for version in self._current.values():
                version.references += 1
            return dict(self._current)

    def finish_commit(self, versions: dict[str, Version]) -> None:
        """Says that a manifest of `versions` is published: older ones are no longer needed."""
        with self._lock:
            superseded, self._committed = self._committed, versions
            for version in superseded.values():
                self._drop_reference(version)

    def cancel_commit(self, versions: Mapping[str, Version]) -> None:
        """Says that nothing was published: the committed versions stay as they were."""
        with self._lock:
            for version in versions.values():
                self._drop_reference(version)

    # Checkpoints.

    def begin_checkpoint(self) -> dict[str, Version]:
        """Returns the committed versions, whose blocks stay until it is decided."""
        with self._lock:
            for version in self._committed.values():
                version.references += 1
            return dict(self._committed)

    def finish_checkpoint(self, name: str, versions: dict[str, Version]) -> None:
        """Says that `versions` have the name; what had it before is no longer needed."""
        with self._lock:
            superseded = self._checkpoints.get(name, {})
            self._checkpoints[name] = versions
            for version in superseded.values():
                self._drop_reference(version)

    def drop_checkpoint(self, name: str) -> None:
        """Says that a checkpoint is gone for good."""
        with self._lock:
            for version in self._checkpoints.pop(name, {}).values():
                self._drop_reference(version)

    def restore(self, versions: Mapping[str, Version]) -> None:
        """Makes the versions of a checkpoint current; writes in flight do not come after it."""
        with self._lock:
            for version in versions.values():
                version.references += 1
            superseded, self._current = self._current, dict(versions)
            for record in superseded.keys() | versions.keys():
                self._supersede(record)
            for version in superseded.values():
                self._drop_reference(version)

    def _is_kept(self, record: str, version: Version) -> bool:
        """Returns whether a commit or a checkpoint needs a current version."""
        kept = (self._committed, *self._checkpoints.values())
        return any(versions.get(record) is version for versions in kept)

    def _supersede(self, record: str) -> None:
        self._newest_serial[record] = self._next_serial
        self._next_serial += 1

    def _take(self, version: Version) -> None:
        taken: list[Extent] = []
        for extent in version.extents:
            try:
                self._allocators[extent.path_index].take_exactly(extent)
            except StoreError:
                self._release(taken)
                raise
            taken.append(extent)

    def _require(self, record: str, among: Mapping[str, Version]) -> Version:
        version = among.get(record)
        if version is None:
            raise StoreError(
                f"no record `{record}`: expected one of {len(among)} records, found "
                "none of that name; write it first"
            )
        return version

    def _require_checkpoint(self, name: str) -> dict[str, Version]:
        if name not in self._checkpoints:
            raise StoreError(
                f"no checkpoint `{name}`: expected one of {sorted(self._checkpoints)}, found none "
                "of that name; `offload inspect` lists them"
            )
        return self._checkpoints[name]

    def _drop_reference(self, version: Version) -> None:
        version.references -= 1
        if version.references == 0:
            self._release(version.extents)

    def _release(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._allocators[extent.path_index].release((extent,))
