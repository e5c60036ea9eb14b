"""What `offload clean` finds and deletes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.storage.dead_stores import (
    FoundDirectory,
    delete_directory,
    find_directories,
    is_store_directory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaning:
    """The stores that no process owns, and those that were deleted."""

    dead: list[FoundDirectory]
    in_use: list[FoundDirectory]
    deleted: list[FoundDirectory]

    def to_json(self) -> dict[str, Any]:
        return {
            "dead": [found.to_json() for found in self.dead],
            "in_use": [found.to_json() for found in self.in_use],
            "deleted": [found.to_json() for found in self.deleted],
            "deleted_bytes": sum(found.num_bytes for found in self.deleted),
        }


def clean(path: Path, *, delete: Sequence[Path] = ()) -> Cleaning:
    """Returns the stores at and below `path`; deletes those that `delete` names, and nothing else.

    Args:
        path: Where to look.
        delete: Store directories, absolute or relative to `path` or the current directory.

    Raises:
        ConfigError: `path` is no directory, or one of `delete` is no store at or below it; nothing
            is deleted.
        StoreError: One of `delete` is in use; what came before it is deleted.
    """
    if not path.is_dir():
        raise ConfigError(
            f"cannot look for stores in `{path}`: expected a directory, found "
            f"{'a file' if path.exists() else 'nothing'}; correct the path"
        )
    deleted = [delete_directory(root) for root in [_within(path, name) for name in delete]]
    found = list(find_directories(path))
    return Cleaning(
        dead=[store for store in found if store.owner is None],
        in_use=[store for store in found if store.owner is not None],
        deleted=deleted,
    )


def _within(path: Path, name: Path) -> Path:
    for candidate in (path / name, name):
        is_below = candidate.resolve().is_relative_to(path.resolve())
        if is_below and is_store_directory(candidate):
            return candidate.absolute()
    raise ConfigError(
        f"cannot delete `{name}`: expected a store at or below `{path}`, found none; name one that "
        "`offload clean` lists"
    )
