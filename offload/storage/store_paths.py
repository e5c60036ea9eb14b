"""The storage paths of one store: what each may hold, and whether it still takes new blocks."""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import add
from pathlib import Path
from typing import Protocol

from offload.errors import StorageError
from offload.plan.storage import margin_bytes
from offload.sizes import format_size
from offload.storage.backend import BackendStats
from offload.storage.buffer import Buffer
from offload.storage.data_file import DataFile
from offload.storage.engine import PathStats, Priority
from offload.storage.file import StorageFile
from offload.storage.manifest_files import ManifestFiles

_log = logging.getLogger("offload.storage")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A path that says one of these is full: what it has is kept, and it grows no more."""


class PathTicket(Protocol):
    """One transfer in flight; as `engine.Ticket`."""

    def wait(self, timeout_s: float | None = None) -> None: ...
    def done(self) -> bool: ...
    def notify(self, event_fd: int | None) -> bool: ...


class PathEngine(Protocol):
    """Carries out the transfers of a path; as `engine.Engine`."""

    def read(
        self, file: StorageFile, offset: int, into: Buffer, *, priority: Priority = Priority.NEEDED
    ) -> PathTicket: ...

    def write(
        self,
        file: StorageFile,
        offset: int,
        source: Buffer,
        *,
        priority: Priority = Priority.WRITE_BACK,
    ) -> PathTicket: ...

    def flush(self, file: StorageFile) -> None: ...
    def path_stats(self) -> list[PathStats]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePath:
    """One directory of a store and what may be used of its path."""

    root: Path
    capacity_bytes: int | None = None
    """The most that its data file may have; None: all free space but a margin."""
    shares_capacity: bool = False
    """Whether files beside the data file take their part: it then grows by what is needed only."""
    nominal_bytes_per_s: float | None = None
    """Bytes in and out again each second by the machine's profile, where there is one."""
    limit_bytes_per_s: float | None = None
    """Bytes/s of both directions together that its engine is held to; None: no limit."""


class PathUse(Enum):
    """Whether a path takes new blocks. It never goes back."""

    OPEN = "in use"
    """Its data file grows as needed."""
    FULL = "full"
    """Blocks that become free in its data file are used again; the file does not grow."""
    LEFT_OUT = "left out"
    """It cannot be written: nothing new goes there, what is there is read."""


class OpenPath:
    """One path of an open store.

    Attributes:
        needs_sync: Something was written there since its last sync.

    Concurrency: Any thread.
    """

    def __init__(
        self, config: StorePath, *, index: int, engine: PathEngine, data: DataFile
    ) -> None:
        self.config = config
        self.index = index
        self.engine = engine
        self.data = data
        self.manifests = ManifestFiles(config.root)
        self.use = PathUse.OPEN
        self.needs_sync = False
        self._block_bytes = data.block_bytes
        self._growing = threading.Lock()
        self._spilled_bytes = 0

    @property
    def root(self) -> Path:
        return self.config.root

    def counters(self) -> BackendStats:
        """Returns the counters of its engine."""
        return reduce(add, (path.counters for path in self.engine.path_stats()), BackendStats())

    def growable_blocks(self) -> int:
        """Returns by how many blocks the data file may still grow."""
        if self.use is not PathUse.OPEN:
            return 0
        growable = self.device_blocks()
        if self.config.capacity_bytes is None:
            return growable
        most = (self.config.capacity_bytes - self._spilled_bytes) // self._block_bytes
        return max(0, min(growable, most - self.data.num_blocks()))

    def try_spill(self, num_bytes: int) -> bool:
        """Counts bytes of a file beside the data file; False where the path has no room."""
        with self._growing:
            if self.use is not PathUse.OPEN or num_bytes > self._spillable_bytes():
                return False
            self._spilled_bytes += num_bytes
            return True

    def end_spill(self, num_bytes: int) -> None:
        """Gives back what `try_spill` counted."""
        with self._growing:
            self._spilled_bytes -= num_bytes

    def _spillable_bytes(self) -> int:
        free = self.device_blocks() * self._block_bytes
        if self.config.capacity_bytes is None:
            return free
        taken = self.data.num_blocks() * self._block_bytes + self._spilled_bytes
        return min(free, self.config.capacity_bytes - taken)

    def device_blocks(self) -> int:
        """Returns how many more blocks the file system has room for, but for a margin."""
        status = os.fstatvfs(self.data.file.fd)
        margin = margin_bytes(status.f_blocks * status.f_frsize)
        return max(0, status.f_bavail * status.f_frsize - margin) // self._block_bytes

    @property
    def device(self) -> int:
        """The same number for paths that share their free space."""
        return os.fstat(self.data.file.fd).st_dev

    def grow(self, num_blocks: int) -> int:
        """Adds at least `num_blocks` free blocks and returns how many the data file has now.

        Raises:
            StorageError: There is no room for them.
        """
        with self._growing:
            growable = self.growable_blocks()
            if self.config.shares_capacity:
                growable = min(growable, num_blocks)
            return self.data.grow(
                needed_blocks=num_blocks, most_blocks=self.data.num_blocks() + growable
            )

    def mark_full(self, reason: object) -> None:
        """Says that the data file cannot grow any more."""
        if self.use is PathUse.OPEN:
            self.use = PathUse.FULL
            _log.warning(
                "path `%s` is full at %s: new blocks go to the other paths from now on (%s)",
                self.root,
                format_size(self.data.num_blocks() * self._block_bytes),
                reason,
            )

    def leave_out(self, reason: object) -> None:
        """Says that the path cannot be written."""
        if self.use is not PathUse.LEFT_OUT:
            self.use = PathUse.LEFT_OUT
            _log.warning(
                "path `%s` cannot be written and is left out from now on: the run goes on with "
                "the other paths; what is on it is still read (%s)",
                self.root,
                reason,
            )

    def note_write_error(self, error: StorageError) -> None:
        """Draws the consequence of a failed write: the path is left out."""
        self.leave_out(error)


def open_paths(
    configs: Sequence[StorePath],
    *,
    engines: Sequence[PathEngine],
    block_bytes: int,
    creates: Container[int],
    reads_only: Container[Path],
) -> list[OpenPath]:
    """Opens the data file of each path; all or none.

    Args:
        configs: By path.
        engines: By path; the last one serves all further ones.
        block_bytes: Of the store.
        creates: Indices of the paths that are new.
        reads_only: Directories in which nothing is written.
    """
    paths: list[OpenPath] = []
    with contextlib.ExitStack() as opened:
        for index, config in enumerate(configs):
            data = DataFile(config.root, path_index=index, block_bytes=block_bytes)
            opened.callback(data.close)
            data.open(create=index in creates, read_only=config.root in reads_only)
            engine = engines[min(index, len(engines) - 1)]
            paths.append(OpenPath(config, index=index, engine=engine, data=data))
        opened.pop_all()
    return paths


def close_paths(paths: Iterable[OpenPath]) -> None:
    """Closes the data files, also the others where one gives an error."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.callback(path.data.close)
