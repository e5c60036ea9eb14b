"""Files on storage, opened for direct transfers where the file system allows it."""

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from offload.errors import StorageError
from offload.storage.direct import accepts_direct, direct_alignment
from offload.storage.in_flight import InFlight

_LOGGER = logging.getLogger("offload.storage")
_CLOSED_FD = -1
_MODE = 0o600

_warned_lock = threading.Lock()
_warned_directories: set[Path] = set()


@dataclass(slots=True, kw_only=True, eq=False)
class StorageFile:
    """An open file.

    `alignment` is what addresses, offsets and lengths of transfers must be multiples of: 1 for a
    buffered file. `fd` is -1 once the file is closed. `before_close` holds what has to happen while
    the descriptor is still this file's, by whom it is for.
    """

    path: Path
    fd: int
    is_direct: bool = False
    alignment: int = 1
    in_flight: InFlight = field(default_factory=InFlight, repr=False)
    before_close: dict[object, Callable[[], None]] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Waits for the file's transfers in flight and closes it; again does nothing.

        A number of a closed file may be given to another one: a transfer that still used it
        would reach that one.
        """
        self.in_flight.drain()
        while self.before_close:
            self.before_close.popitem()[1]()
        fd, self.fd = self.fd, _CLOSED_FD
        if fd != _CLOSED_FD:
            os.close(fd)


def open_file(
    path: Path, *, create: bool = False, read_only: bool = False, direct: bool | None = None
) -> StorageFile:
    """Opens a regular file; symbolic links are refused.

    Args:
        path: The file.
        create: Makes the file, mode 0600, where it does not exist.
        read_only: Opens for reading only.
        direct: True asks for O_DIRECT, False for the page cache. None takes O_DIRECT where the
            file system carries out a transfer with it, and else warns once per directory.

    Raises:
        StorageError: The file cannot be opened, or not with O_DIRECT where that is asked.
    """
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | (os.O_CREAT if create else 0)
    if direct is not False:
        file = _try_open_direct(path, flags)
        if file is not None:
            return file
        if direct:
            raise StorageError(
                f"cannot open file `{path}`: expected a file system that takes O_DIRECT, found one "
                "that refuses it; open it with `direct=None` or choose another path",
                errno=errno.EINVAL,
            )
        _warn_buffered(path)
    return StorageFile(path=path, fd=_open(path, flags))


def _try_open_direct(path: Path, flags: int) -> StorageFile | None:
    try:
        fd = _open(path, flags | os.O_DIRECT)
    except StorageError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    try:
        alignment = direct_alignment(fd)
        if alignment is not None and _probe(path, fd, alignment=alignment, flags=flags):
            return StorageFile(path=path, fd=fd, is_direct=True, alignment=alignment)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _probe(path: Path, fd: int, *, alignment: int, flags: int) -> bool:
    # Without `create` an empty file is somebody's, and not written to.
    may_write = bool(flags & os.O_CREAT)
    try:
        return accepts_direct(fd, alignment=alignment, may_write=may_write)
    except OSError as error:
        raise _open_error(path, error) from error


def _open(path: Path, flags: int) -> int:
    try:
        # O_NONBLOCK: opening a pipe would wait for its other end.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, _MODE)
    except OSError as error:
        raise _open_error(path, error) from error
    try:
        _require_regular(path, fd)
        os.set_blocking(fd, True)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _open_error(path, error) from error
        raise
    return fd


def _require_regular(path: Path, fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise StorageError(
            f"cannot open file `{path}`: expected a regular file, found another kind; remove it "
            "or choose another path",
            errno=errno.EINVAL,
        )


def _open_error(path: Path, error: OSError) -> StorageError:
    code = error.errno or errno.EIO
    expected = "a file that is not a symbolic link" if code == errno.ELOOP else "to open it"
    return StorageError(
        f"cannot open file `{path}`: expected {expected}, found {errno.errorcode.get(code, code)} "
        f"({os.strerror(code)}); check the path, its permissions and its free space",
        errno=code,
    )


def _warn_buffered(path: Path) -> None:
    directory = path.parent
    with _warned_lock:
        if directory in _warned_directories:
            return
        _warned_directories.add(directory)
    _LOGGER.warning(
        "files in `%s` are read and written through the page cache: expected a file system that "
        "takes O_DIRECT, found one that refuses it; this uses memory outside the budgets and is "
        "slower. Choose a path on a local ext4 or xfs file system",
        directory,
    )
