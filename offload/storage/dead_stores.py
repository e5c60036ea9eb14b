"""Stores below a directory that no process owns any more, and deleting those that are named."""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import OffloadError, StorageError, StoreError
from offload.storage.manifest_files import ManifestFiles
from offload.storage.opening import find_store
from offload.storage.ownership import OWNER_FILE, live_owner

_MOST_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDirectory:
    """One directory of a store."""

    root: Path
    owner: str | None
    """Who owns it now; None: nobody, it is dead or at rest."""
    num_bytes: int
    """That its files take on their file system."""
    age_s: float
    """Since anything in it was changed."""
    has_commit: bool
    step: int | None
    checkpoints: tuple[str, ...]
    problem: str | None
    """Why its newest commit cannot be read."""

    def to_json(self) -> dict[str, Any]:
        return {
            "store": str(self.root),
            "owner": self.owner,
            "bytes": self.num_bytes,
            "age_s": self.age_s,
            "has_commit": self.has_commit,
            "step": self.step,
            "checkpoints": list(self.checkpoints),
            "problem": self.problem,
        }


def find_directories(path: Path) -> Iterator[FoundDirectory]:
    """Yields the stores at and below `path`, a few levels deep, in the order of their names.

    Takes nothing and changes nothing. Links are not followed.
    """
    start = len(path.parts)
    for directory, names, files in os.walk(path):
        root = Path(directory)
        if OWNER_FILE in files:
            names.clear()
            yield _describe(root)
        elif len(root.parts) - start >= _MOST_DEPTH:
            names.clear()
        names.sort()


def is_store_directory(path: Path) -> bool:
    """Returns whether `path` itself, not a link to it, is a directory of a store."""
    return (path / OWNER_FILE).is_file() and not path.is_symlink()


def delete_directory(root: Path) -> FoundDirectory:
    """Deletes one directory of a store, whatever it holds, and returns what it was.

    Raises:
        StoreError: It is no store, or a process owns it.
        StorageError: A file could not be deleted.
    """
    if not is_store_directory(root):
        raise StoreError(
            f"cannot delete `{root}`: expected the directory of a store, with a file "
            f"`{OWNER_FILE}`, found none; `offload clean` without `--delete` lists those there are"
        )
    found = _describe(root)
    if found.owner is not None:
        raise StoreError(
            f"cannot delete store `{root}`: expected no owner, found {found.owner}; end it first"
        )
    try:
        shutil.rmtree(root)
    except OSError as error:
        raise StorageError(
            f"cannot delete store `{root}`: expected to delete all its files, found "
            f"{error.strerror} for `{error.filename}`; delete the rest by hand",
            errno=error.errno,
        ) from error
    return found


def _describe(root: Path) -> FoundDirectory:
    owner = live_owner(root)
    step: int | None = None
    problem: str | None = None
    has_commit = False
    try:
        step = find_store([root]).manifest.head.get("step")
        has_commit = True
    except StoreError:
        pass  # an aborted start
    except OffloadError as error:
        problem = str(error)
    num_bytes, changed_s = 0, 0.0
    for entry in root.iterdir():
        status = entry.lstat()
        num_bytes += status.st_blocks * 512
        changed_s = max(changed_s, status.st_mtime)
    return FoundDirectory(
        root=root,
        owner=owner.describe() if owner else None,
        num_bytes=num_bytes,
        age_s=max(0.0, time.time() - changed_s),
        has_commit=has_commit,
        step=step,
        checkpoints=tuple(ManifestFiles(root).checkpoint_names()),
        problem=problem,
    )
