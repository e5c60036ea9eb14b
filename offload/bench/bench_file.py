"""The file that a benchmark reads and writes, and the memory that it does so with."""

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# At the start: NumPy loads it when first used, and an interrupt at that moment can get lost.
from numpy.random import default_rng

from offload.errors import ConfigError, StorageError
from offload.sizes import MIB, format_size
from offload.storage.file import StorageFile, open_file

_SPARE_BYTES = 64 * MIB
_HUGE_BYTES = 2 * MIB
_PATTERN_BYTES = 16 * MIB


def require_free_space(path: Path, num_bytes: int) -> None:
    """Raises ConfigError if a file of `num_bytes` does not fit on `path` with room to spare."""
    facts = os.statvfs(path)
    free_bytes = facts.f_bavail * facts.f_frsize
    if free_bytes < num_bytes + _SPARE_BYTES:
        raise ConfigError(
            f"cannot run the benchmark on path `{path}`: expected "
            f"{format_size(num_bytes + _SPARE_BYTES)} free, found {format_size(free_bytes)}; free "
            "some, lower `--size`, or name another path"
        )


@contextmanager
def bench_file(path: Path, *, buffered: bool) -> Iterator[StorageFile]:
    """Gives a new, empty file on `path` that has no name any more.

    So it replaces nobody's file, and no end of the process, Ctrl-C or SIGKILL, leaves it behind.
    """
    file = _open_unnamed(path, direct=False if buffered else None)
    try:
        yield file
    finally:
        file.close()


def _open_unnamed(path: Path, *, direct: bool | None) -> StorageFile:
    name = path / f".offload-bench-{secrets.token_hex(8)}"
    # Between these lines an interrupt may come at any time: the name goes in every case, and
    # nobody else's file has it.
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        return open_file(name, create=True, direct=direct)
    except OSError as error:
        raise StorageError(
            f"cannot make a file on path `{path}`: expected a directory that this user may write "
            f"to, found {error.strerror or error}; name another path",
            errno=error.errno,
        ) from error
    finally:
        name.unlink(missing_ok=True)


class BenchMemory:
    """Memory for transfers: page-aligned, on huge pages where possible, filled with noise.

    Devices and file systems that compress or merge equal blocks must not find any.
    """

    def __init__(self, num_bytes: int) -> None:
        # Private: of shared memory the kernel may give no huge pages, though it is advised to.
        self._map = mmap.mmap(
            -1, num_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % _HUGE_BYTES
        self.bytes = whole[start : start + num_bytes]
        noise = default_rng(0).integers(0, 256, min(_PATTERN_BYTES, num_bytes), dtype=np.uint8)
        for at in range(0, num_bytes, len(noise)):
            part = self.bytes[at : at + len(noise)]
            part[:] = noise[: len(part)]
            part[::4096] += np.uint8(at // len(noise) & 255)
