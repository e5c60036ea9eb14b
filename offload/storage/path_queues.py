"""The queues of an I/O engine: one for each path, with threads of its own."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path

from offload.errors import StorageError
from offload.storage.backend import Backend, BackendStats, PathStats
from offload.storage.backend_aiofiles import AiofilesBackend
from offload.storage.backend_native import NativeBackend
from offload.storage.buffer import BufferView
from offload.storage.faults import FlushFaults
from offload.storage.paths import BACKENDS, PathSettings

_LOGGER = logging.getLogger("offload.storage")
_MAX_REMEMBERED = 4096


class PathQueue:
    """The open backend of one path."""

    def __init__(self, settings: PathSettings, backend: Backend) -> None:
        self.settings = settings
        self.backend = backend
        self.flush_faults = None if settings.faults is None else FlushFaults(settings.faults)

    def stats(self) -> PathStats:
        """Returns its counters since it was opened."""
        settings = self.settings
        return PathStats(
            root=settings.root,
            backend=self.backend.name,
            queue_depth=settings.queue_depth,
            block_bytes=settings.block_bytes,
            counters=self.backend.stats(),
        )


class PathQueues:
    """Finds the queue of a file.

    A file belongs to the path whose root is the nearest directory above it. The queue for files
    of no path is opened when the first such file is used, or at once if there are no paths.

    Concurrency: Any thread, but `open` and `close`.
    """

    def __init__(self, default: PathSettings, paths: Sequence[PathSettings]) -> None:
        self._default_settings = default
        self._settings = tuple(paths)
        self._lock = threading.Lock()  # of all below
        self._queues: dict[Path | None, PathQueue] = {}
        self._by_file: dict[Path, PathQueue] = {}

    @property
    def name(self) -> str | None:
        """The backend of the first path; None before `open`."""
        queues = list(self)
        return queues[0].backend.name if queues else None

    def open(self) -> None:
        """Opens the queue of each path.

        Raises:
            StorageError: This machine refuses a backend; nothing is left open.
        """
        self._by_file.clear()
        self._queues.clear()
        try:
            for settings in self._settings or (self._default_settings,):
                root = None if settings.root is None else Path(os.path.abspath(settings.root))
                self._queues[root] = PathQueue(settings, open_backend(settings))
        except BaseException:
            self.close()
            self._queues.clear()
            raise

    def close(self) -> None:
        """Carries out what was submitted and closes the backends; counters stay."""
        for queue in self:
            queue.backend.close()

    def cancel(self) -> None:
        """Ends what has not begun."""
        for queue in self:
            queue.backend.cancel()

    def find(self, file: Path) -> PathQueue:
        """Returns the queue for a file."""
        with self._lock:
            if not self._settings and None in self._queues:
                return self._queues[None]
            queue = self._by_file.get(file)
            if queue is None:
                queue = self._find(Path(os.path.abspath(file)))
                if len(self._by_file) >= _MAX_REMEMBERED:
                    self._by_file.clear()
                self._by_file[file] = queue
            return queue

    def register(self, view: BufferView) -> bool:
        """Announces memory to each backend; False if none of them uses that."""
        is_used = [queue.backend.register(view) for queue in self]
        return any(is_used)

    def unregister(self, view: BufferView) -> None:
        """Takes `register` back."""
        for queue in self:
            queue.backend.unregister(view)

    def stats(self) -> BackendStats:
        """Returns the counters of all."""
        # Asked for at each transfer of a store, whose engines have one queue: nothing to add.
        counters = [queue.backend.stats() for queue in self]
        return reduce(add, counters) if counters else BackendStats()

    def __iter__(self) -> Iterator[PathQueue]:
        with self._lock:
            return iter(list(self._queues.values()))

    def _find(self, file: Path) -> PathQueue:
        for directory in file.parents:
            if directory in self._queues:
                return self._queues[directory]
        if None not in self._queues:
            settings = self._default_settings
            self._queues[None] = PathQueue(settings, open_backend(settings))
        return self._queues[None]


def open_backend(settings: PathSettings) -> Backend:
    """Returns the backend that `settings` ask for, open.

    Raises:
        StorageError: This machine refuses it.
    """
    if settings.backend != "auto":
        return _opened(settings.backend, settings)
    refused: list[str] = []
    for name in BACKENDS[:-1]:
        try:
            backend = _opened(name, settings)
        except StorageError as error:
            refused.append(str(error))
        else:
            break
    else:
        backend = _opened(BACKENDS[-1], settings)
    _log_choice(backend.name, refused)
    return backend


def _opened(name: str, settings: PathSettings) -> Backend:
    queue_depth, block_bytes = settings.queue_depth, settings.block_bytes
    backend: Backend
    if name == "aiofiles":
        backend = AiofilesBackend(queue_depth=queue_depth, block_bytes=block_bytes)
    else:
        backend = NativeBackend(
            name, queue_depth=queue_depth, block_bytes=block_bytes, faults=settings.faults
        )
    backend.open()
    return backend


_logged_lock = threading.Lock()
_logged: set[str] = set()


def _log_choice(name: str, refused: Sequence[str]) -> None:
    with _logged_lock:
        if name in _logged:
            return
        _logged.add(name)
    if refused:
        _LOGGER.warning("I/O uses the backend `%s`, since: %s", name, "; ".join(refused))
    else:
        _LOGGER.info("I/O uses the backend `%s`, the first choice", name)
