"""Which versions of records a store has, and which blocks they keep.

[Note: who keeps blocks] A version's blocks are free when nothing needs them: it is not current,
the newest published manifest does not name it, nobody reads it and its write is over. Each of
these is one reference. Superseding a version therefore frees its blocks at once if no commit
published it, and otherwise when the next commit has been published.
"""

import threading
from collections.abc import Mapping

from offload.errors import StoreError
from offload.storage.allocator import BlockAllocator
from offload.storage.extents import Version, num_blocks_for


class VersionTable:
    """Current and committed versions by record name, over the blocks of one data file.

    Decides only: no file is touched here.

    Concurrency: Any thread; a lock is held for short, pure work.
    """

    def __init__(self, *, block_bytes: int, num_blocks: int) -> None:
        self._lock = threading.Lock()
        self._block_bytes = block_bytes
        self._allocator = BlockAllocator(num_blocks=num_blocks)
        self._current: dict[str, Version] = {}
        self._committed: dict[str, Version] = {}
        self._newest_serial: dict[str, int] = {}  # what was last written to or said of a record
        self._next_serial = 1

    def load(self, records: Mapping[str, Version]) -> None:
        """Makes the versions of a manifest current and committed."""
        with self._lock:
            for version in records.values():
                for extent in version.extents:
                    self._allocator.take_exactly(extent)
                version.references += 2
            self._current = dict(records)
            self._committed = dict(records)

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
            return self._require(record)

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def num_taken_blocks(self) -> int:
        return self._allocator.num_taken

    # Writing: a version is allocated, then published or released.

    def num_missing_blocks(self, num_bytes: int) -> int:
        """Returns how many free blocks are lacking for a version of `num_bytes`."""
        with self._lock:
            needed = num_blocks_for(num_bytes, self._block_bytes)
            return max(0, needed - self._allocator.num_free)

    def grow(self, num_blocks: int) -> None:
        """Says that the data file now has `num_blocks` blocks."""
        with self._lock:
            self._allocator.grow(num_blocks)

    def try_allocate(self, num_bytes: int) -> Version | None:
        """Returns a new version in blocks that nothing needs, None where too few are free."""
        with self._lock:
            extents = self._allocator.try_take(num_blocks_for(num_bytes, self._block_bytes))
            if extents is None:
                return None
            version = Version(
                num_bytes=num_bytes, extents=extents, serial=self._next_serial, references=1
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

    def discard(self, record: str) -> None:
        """Drops the record from the current versions; a write in flight does not revive it."""
        with self._lock:
            version = self._current.pop(record, None)
            self._newest_serial[record] = self._next_serial
            self._next_serial += 1
            if version is not None:
                self._drop_reference(version)

    # Reading.

    def hold(self, record: str) -> Version:
        """Returns the current version, whose blocks stay until `release`.

        Raises:
            StoreError: There is none.
        """
        with self._lock:
            version = self._require(record)
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

    def _require(self, record: str) -> Version:
        version = self._current.get(record)
        if version is None:
            raise StoreError(
                f"no record `{record}`: expected one of {len(self._current)} records, found "
                "none of that name; write it first"
            )
        return version

    def _drop_reference(self, version: Version) -> None:
        version.references -= 1
        if version.references == 0:
            self._allocator.release(version.extents)
