"""Whether copies of checkpoints would survive the paths that they are copied from."""

from collections.abc import Sequence
from pathlib import Path


def shared_path(target: Path, paths: Sequence[Path]) -> Path | None:
    """Returns the first of `paths` on whose file system `target` lies or would be made."""
    device = existing_directory(target).stat().st_dev
    for path in paths:
        if existing_directory(path).stat().st_dev == device:
            return path
    return None


def existing_directory(path: Path) -> Path:
    """Returns `path`, or the nearest directory above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
