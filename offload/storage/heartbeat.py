"""Signs of life of an owner, for machines that cannot see its process.

[Note: heartbeat] On a file system of another machine a lock may be lost without a word, and other
machines cannot look for the process. So its owner changes the time of the owner file every few
seconds, by the server's clock. Whoever finds a claim that it cannot judge compares that time with
the server's own; the clocks of two machines are never compared.
"""

import logging
import os
import threading
import time
from pathlib import Path

from offload.storage.threads import join

_log = logging.getLogger("offload.storage")

BEAT_S = 10.0
DEAD_AFTER_S = 120.0
"""An owner that gave no sign for this long has ended: twelve beats, longer than a server's usual
pause."""


class Heartbeat:
    """Touches a file every few seconds, on a thread of its own.

    Concurrency: `stop` ends the thread; both may be called again.
    """

    def __init__(self, path: Path, *, beat_s: float = BEAT_S) -> None:
        self._path = path
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to touch the file."""
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="offload-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            join(thread)

    def _run(self) -> None:
        is_warned = False
        while not self._ended.wait(self._beat_s):
            try:
                os.utime(self._path)
            except OSError as error:
                if not is_warned:
                    _log.warning(
                        "cannot touch owner file `%s`: %s; another machine may take the store "
                        "over after %.0f s without a sign",
                        self._path,
                        error.strerror,
                        DEAD_AFTER_S,
                    )
                is_warned = True


def silent_s(path: Path) -> float | None:
    """Returns for how long an owner file was not touched, by the clock of its file system.

    None where that cannot be told: the directory takes no file.
    """
    probe = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.now")
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            now_s = os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            probe.unlink()
        return now_s - path.stat().st_mtime
    except OSError:
        return None
