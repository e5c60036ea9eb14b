"""Opening what a commit left: which directories it takes, and whether all of it is there."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from offload.errors import CorruptStateError
from offload.storage.data_file import data_file_name
from offload.storage.manifest import Manifest
from offload.storage.opening import FoundStore
from offload.storage.store_parts import StoreParts
from offload.storage.store_paths import OpenPath, PathUse, StorePath

_log = logging.getLogger("offload.storage")


def configs_of(
    found: FoundStore, wanted: Sequence[StorePath], *, read_only: bool
) -> list[StorePath]:
    """Returns the configuration of each path: what was asked for, or where it is."""
    asked = {config.root: config for config in wanted}
    configs = []
    for index in range(found.manifest.num_paths):
        root = found.directory(index)
        configs.append(asked.pop(root) if root in asked else StorePath(root=root))
    known = {config.root.resolve() for config in configs}
    new = [config for config in asked.values() if config.root.resolve() not in known]
    # A directory that is asked for and has none of the store's data files is a new path.
    return configs if read_only else configs + new


def require_readable(found: FoundStore, *, root: Path, advice: str) -> None:
    """Checks that every data file that the commit uses is there.

    Raises:
        CorruptStateError: One is missing.
    """
    for index, directory in enumerate(found.roots):
        if directory is None and found.manifest.uses(index):
            where = found.directory(index)
            used = sum(
                any(extent.path_index == index for extent in version.extents)
                for version in found.manifest.records.values()
            )
            raise CorruptStateError(
                f"cannot open store `{root}`: data file `{where / data_file_name(index)}` "
                f"is missing: expected it, as {used} of {len(found.manifest.records)} records "
                "have blocks there; mount the path again or restore the file from a copy, "
                f"else these records are lost{'; ' + advice if advice else ''}"
            )


def load_commit(
    parts: StoreParts,
    manifest: Manifest,
    *,
    created_in: tuple[Path, ...],
    read_only: bool,
    describe: Callable[[str], str] | None,
) -> None:
    """Makes what `manifest` names current and committed, and keeps the checkpoints.

    Raises:
        CorruptStateError: A data file lacks blocks of it; of a read-only store that shows when
            they are read, so that all else can be.
    """
    parts.commits.start_after(manifest, checkpoints={})  # messages say what records hold
    for path in parts.paths:
        if read_only:
            parts.versions.grow(path.index, manifest.end_block(path.index))
        else:
            _check_not_truncated(manifest, path, describe)
    parts.versions.load(manifest.records)
    checkpoints: dict[str, Manifest] = {}
    for name, kept in _read_checkpoints(parts.paths, manifest).items():
        try:
            for path in parts.paths:
                if read_only:
                    parts.versions.grow(path.index, kept.end_block(path.index))
            parts.versions.load_checkpoint(name, kept.records)
            checkpoints[name] = kept
        except CorruptStateError as error:
            _log.warning("%s", error)
    parts.commits.start_after(manifest, checkpoints=checkpoints, created_in=created_in)


def settle_paths(
    paths: Sequence[OpenPath], found: FoundStore, *, root: Path, wanted: Sequence[StorePath]
) -> None:
    """Deletes what unfinished commits left, and leaves out the paths not asked for any more."""
    asked = {config.root.resolve() for config in wanted}
    for path in paths:
        if path.use is PathUse.LEFT_OUT:
            continue
        path.manifests.delete_temporaries()
        if path.index < found.manifest.num_paths and path.root.resolve() not in asked:
            path.use = PathUse.LEFT_OUT
            _log.warning(
                "path `%s` of store `%s` is not asked for any more: it takes no new blocks, "
                "what is on it is still read",
                path.root,
                root,
            )


def _check_not_truncated(
    manifest: Manifest, path: OpenPath, describe: Callable[[str], str] | None
) -> None:
    num_blocks, block_bytes = path.data.num_blocks(), manifest.block_bytes
    for record, version in manifest.records.items():
        for extent in version.extents:
            if extent.path_index == path.index and extent.end_block > num_blocks:
                what = f" ({describe(record)})" if describe else ""
                raise CorruptStateError(
                    f"record `{record}`{what} is damaged: file `{path.data.path}` is "
                    f"truncated: expected at least {extent.end_block * block_bytes} "
                    f"bytes, found {num_blocks * block_bytes} in whole blocks; restore "
                    "the file from a copy or resume from another checkpoint"
                )


def _read_checkpoints(paths: Sequence[OpenPath], newest: Manifest) -> dict[str, Manifest]:
    """Returns the newest manifest of each checkpoint; damaged ones are left with a warning."""
    found: dict[str, Manifest] = {}
    for path in paths:
        for name in path.manifests.checkpoint_names():
            try:
                manifest = path.manifests.read_checkpoint(name)
            except (CorruptStateError, FileNotFoundError) as error:
                _log.warning("%s; it is not loaded from there", error)
                continue
            if manifest.store_id != newest.store_id or manifest.block_bytes != newest.block_bytes:
                _log.warning("checkpoint `%s` in `%s` is of another store", name, path.root)
            elif name not in found or manifest.sequence > found[name].sequence:
                found[name] = manifest
    return found
