"""What `offload clean` finds and deletes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.storage.dead_stores import FoundDirectory, delete_directory, find_directories


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
        ConfigError: One of `delete` is not below `path`.
        StoreError: One of `delete` is no store, or is in use; what came before it is deleted.
    """
    deleted = [delete_directory(root) for root in [_within(path, name) for name in delete]]
    found = list(find_directories(path))
    return Cleaning(
        dead=[store for store in found if store.owner is None],
        in_use=[store for store in found if store.owner is not None],
        deleted=deleted,
    )


def _within(path: Path, name: Path) -> Path:
    for candidate in (path / name, name):
        if candidate.is_dir() and candidate.resolve().is_relative_to(path.resolve()):
            return candidate.absolute()
    raise ConfigError(
        f"cannot delete `{name}`: expected a store at or below `{path}`, found none; name one that "
        "`offload clean` lists"
    )
