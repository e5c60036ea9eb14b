"""The directories of a store: what may be made or replaced there."""

from collections.abc import Callable, Sequence
from pathlib import Path

from offload.errors import ConfigError, StorageError, StoreError
from offload.storage.data_file import is_data_file_name
from offload.storage.manifest_files import ManifestFiles, is_checkpoint_file, is_manifest_name
from offload.storage.ownership import OWNER_FILE, require_unowned
from offload.storage.spill import SPILL_NAME


def check_distinct(roots: Sequence[Path]) -> None:
    resolved = [root.resolve() for root in roots]
    for root in roots:
        if resolved.count(root.resolve()) > 1:
            raise ConfigError(
                f"cannot make a store with directory `{root}` twice: expected a directory of its "
                "own on each path; name each path once"
            )


def take_new_directories(
    roots: Sequence[Path], *, acquire: Callable[[Sequence[Path]], None]
) -> tuple[Path, ...]:
    """Makes directories of a store where nothing is, and owns them.

    What a run left there that ended before its first commit is deleted.

    Args:
        roots: Absent, empty, or such leftovers.
        acquire: Takes the ownership of all of them, or raises.

    Returns:
        The directories in which something was made.

    Raises:
        StoreError: Something else is there.
        StorageError: They can't be made.
    """
    for root in roots:
        _check_replaceable(root)
    created_in = list(roots)
    for root in roots:
        created_in.extend(_make_directories(root))
    acquire(roots)
    for root in roots:
        _check_replaceable(root)  # it may have changed before it was owned
        _delete_leftovers(root)
    return tuple(dict.fromkeys(created_in))


def delete_unused(roots: Sequence[Path]) -> bool:
    """Deletes the files of an owned store without commits, but its owner files.

    Returns:
        False where there is a commit, and nothing was deleted.
    """
    for files in map(ManifestFiles, roots):
        if files.sequences() or files.checkpoint_names():
            return False
    for root in roots:
        _delete_leftovers(root)
    return True


def _check_replaceable(root: Path) -> None:
    """Checks that nothing in `root` is worth keeping or another's."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise _not_replaceable(root, "a file") from error
    files = ManifestFiles(root)
    if files.sequences() or files.checkpoint_names():
        require_unowned(root)  # which may have made it since its commits were looked for
        raise StoreError(
            f"cannot create store `{root}`: expected no commit there, found one; "
            "go on with it (`resume=True`, `--resume auto`), or use another directory",
            is_refusal=True,
        )
    foreign = [name for name in names if not _is_own(name)]
    if foreign or (names and OWNER_FILE not in names):
        raise _not_replaceable(root, f"`{(foreign or names)[0]}`")


def _not_replaceable(root: Path, found: str) -> StoreError:
    return StoreError(
        f"cannot create store `{root}`: expected no such directory, an empty one, or a "
        f"store without a commit, found {found}; use another directory",
        is_refusal=True,
    )


def _is_own(name: str) -> bool:
    is_manifest = is_manifest_name(name) or is_checkpoint_file(name)
    # The owner file has companions for a moment, see `heartbeat.silent_s`.
    return name.startswith(OWNER_FILE) or is_manifest or _is_data(name)


def _is_data(name: str) -> bool:
    return is_data_file_name(name) or name == SPILL_NAME


def _delete_leftovers(root: Path) -> None:
    """Deletes what a run left that ended before its first commit."""
    ManifestFiles(root).delete_temporaries()
    for path in root.iterdir():
        if _is_data(path.name):
            path.unlink()


def _make_directories(root: Path) -> tuple[Path, ...]:
    """Makes `root` and what is missing above it; returns the directories made anew in.

    Raises:
        StorageError: One can't be made.
    """
    missing = []
    at = root.absolute()
    while not at.exists():
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot create store `{root}`: expected to make `{directory}`, found "
                f"{error.strerror}; name a directory in which you may write",
                errno=error.errno,
            ) from error
    return tuple(directory.parent for directory in missing)
