"""Opening what a commit left: which directories it takes, and whether all of it is there."""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from offload.errors import CorruptStateError, StorageError
from offload.sizes import format_size
from offload.storage.data_file import data_file_name
from offload.storage.manifest import Manifest
from offload.storage.opening import FoundStore
from offload.storage.store_directories import take_new_directories
from offload.storage.store_options import StoreOptions
from offload.storage.store_parts import StoreParts, open_parts
from offload.storage.store_paths import OpenPath, PathUse, StorePath

_log = logging.getLogger("offload.storage")


class Recovery:
    """Opens the paths of a commit, and those asked for besides; then makes the commit current.

    Between the two the store's parts are there, so that messages can say what records hold.
    """

    def __init__(
        self,
        found: FoundStore,
        options: StoreOptions,
        *,
        read_only: bool,
        refused: Mapping[Path, StorageError],
    ) -> None:
        """Stores its arguments.

        Args:
            found: The commit; unless `read_only`, this process owns its directories.
            options: What the store is opened with; it keeps the blocks that it has.
            read_only: Changes nothing.
            refused: Directories that cannot be written, and why.
        """
        self._found = found
        self._options = options
        self._read_only = read_only
        self._refused = refused
        self._created_in: tuple[Path, ...] = ()

    def open(self, *, acquire: Callable[[Sequence[Path]], None]) -> StoreParts:
        """Returns the parts of the store, whose files the caller closes.

        Args:
            acquire: Takes the ownership of directories that are new to the store, or raises.

        Raises:
            StoreError: Something else is in a new directory.
            CorruptStateError: A data file is missing.
        """
        manifest = self._found.manifest
        options = _with_blocks_of(manifest, self._options)
        _require_readable(self._found, root=options.root, advice=options.advise())
        configs = _configs_of(self._found, options.paths, read_only=self._read_only)
        added = range(manifest.num_paths, len(configs))
        self._created_in = take_new_directories(
            [configs[index].root for index in added], acquire=acquire
        )
        return open_parts(
            options,
            configs,
            creates=added,
            store_id=manifest.store_id or uuid.uuid4().hex,
            reads_only={c.root for c in configs if self._read_only or c.root in self._refused},
            read_only=self._read_only,
        )

    def load(self, parts: StoreParts) -> None:
        """Makes the commit current in `parts`, and keeps the checkpoints.

        Raises:
            CorruptStateError: A data file lacks committed blocks.
        """
        for path in parts.paths:
            if path.root in self._refused:
                path.leave_out(self._refused[path.root])
        _load_commit(
            parts,
            self._found.manifest,
            created_in=self._created_in,
            read_only=self._read_only,
            describe=self._options.describe,
        )
        if not self._read_only:
            _settle_paths(
                parts.paths, self._found, root=self._options.root, wanted=self._options.paths
            )


def _with_blocks_of(manifest: Manifest, options: StoreOptions) -> StoreOptions:
    if manifest.block_bytes == options.block_bytes:
        return options
    _log.warning(
        "store `%s` keeps its blocks of %s; %s was asked for and applies to new stores",
        options.root,
        format_size(manifest.block_bytes),
        format_size(options.block_bytes),
    )
    return replace(options, block_bytes=manifest.block_bytes)


def _configs_of(
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


def _require_readable(found: FoundStore, *, root: Path, advice: str) -> None:
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


def _load_commit(
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


def _settle_paths(
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
