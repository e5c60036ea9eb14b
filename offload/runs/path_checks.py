"""What `offload doctor` checks of a directory that is to hold a store."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from offload.errors import StorageError
from offload.runs.checks import Check
from offload.sizes import GIB, format_size
from offload.storage.file import StorageFile, open_file
from offload.storage.mounts import NETWORK_FILE_SYSTEMS, file_system_type

_MIN_FREE_BYTES = 4 * GIB
"""Two versions of the state of a model of 85 M parameters, and room to spare."""
_IN_MEMORY = ("tmpfs", "ramfs")


def path_checks(path: Path) -> Iterator[Check]:
    """Yields the checks of one directory; what a directory can't be used for fails."""
    writable = _writable(path)
    yield writable
    if writable.status == "fail":
        return
    yield _file_system(path)
    yield _direct_io(path)
    yield _free_space(path)


def _writable(path: Path) -> Check:
    name = f"{path}: writable"
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        return Check(
            name=name, status="fail", found=found, remedy=f"make the directory: `mkdir -p {path}`"
        )
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Check(
            name=name,
            status="fail",
            found=error.strerror or str(error),
            remedy="give this user the right to write there, free space, or name another path",
        )
    return Check(name=name, status="ok", found="yes")


def _file_system(path: Path) -> Check:
    name, kind = f"{path}: file system", file_system_type(path)
    remedy = None
    if kind in _IN_MEMORY:
        remedy = "this is memory, not storage: name a directory on a drive"
    elif kind in NETWORK_FILE_SYSTEMS:
        remedy = "a network file system is slow and its locks are weak: prefer a local drive"
    return Check(name=name, status="warn" if remedy else "ok", found=kind, remedy=remedy)


def _direct_io(path: Path) -> Check:
    name = f"{path}: O_DIRECT"
    folder = Path(tempfile.mkdtemp(prefix=".offload-doctor-", dir=path))
    try:
        file = open_file(folder / "probe", create=True)
        try:
            return _describe(name, file)
        finally:
            file.close()
    except StorageError as error:
        return Check(
            name=name, status="fail", found=str(error), remedy="name a path on another file system"
        )
    finally:
        shutil.rmtree(folder)


def _describe(name: str, file: StorageFile) -> Check:
    if file.is_direct:
        return Check(name=name, status="ok", found=f"yes, alignment {file.alignment} B")
    return Check(
        name=name,
        status="warn",
        found="refused, transfers go through the page cache",
        remedy="name a path on a file system such as ext4 or xfs",
    )


def _free_space(path: Path) -> Check:
    free_bytes = shutil.disk_usage(path).free
    enough = free_bytes >= _MIN_FREE_BYTES
    return Check(
        name=f"{path}: free space",
        status="ok" if enough else "warn",
        found=format_size(free_bytes),
        remedy=None
        if enough
        else "a store holds about twice its state; `offload plan` says how much",
    )
