"""Finding a store's directories and its newest commit from any of them. Changes nothing."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import CorruptStateError, StoreError
from offload.storage.data_file import data_file_name, is_data_file_name
from offload.storage.manifest import Manifest
from offload.storage.manifest_files import ManifestFiles

_log = logging.getLogger("offload.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStore:
    """The newest complete commit of a store and where its paths are now."""

    manifest: Manifest
    roots: tuple[Path | None, ...]
    """By path of the manifest; None: its data file is nowhere to be found."""

    def directory(self, path_index: int) -> Path:
        """Returns where a path is, or where it was when the commit was made."""
        found = self.roots[path_index]
        if found is not None:
            return found
        return self.manifest.roots[path_index] if self.manifest.roots else Path("?")


def find_store(roots: Sequence[Path]) -> FoundStore:
    """Returns the newest complete commit of the store that has any of `roots`.

    Raises:
        StoreError: There is no store, it has no commit yet, or the directories are of two stores.
        CorruptStateError: There are manifests and none is complete.
    """
    newest = _newest(roots)
    if newest is None:
        names = (each.name for root in roots if root.is_dir() for each in root.iterdir())
        if not any(map(is_data_file_name, names)):
            raise StoreError(
                f"no store at `{roots[0]}`: expected a file `manifest-…` with a complete commit, "
                "found neither that nor data of a store; check the path"
            )
        raise StoreError(
            f"store `{roots[0]}` has no complete commit: expected a file `manifest-…`, found none; "
            "the run that made it ended before its first commit: start it again from the beginning"
        )
    return FoundStore(manifest=newest, roots=tuple(_located(newest, roots)))


def has_commit(*roots: Path) -> bool:
    """Returns whether `open` would find a complete commit: what `auto` resumes from.

    Raises:
        CorruptStateError: There are manifests and none is complete.
        StoreError: A newer `offload` wrote the newest one.
    """
    there = [root for root in roots if root.is_dir()]
    return bool(there) and _newest(there) is not None


def _newest(roots: Sequence[Path]) -> Manifest | None:
    """Looks in `roots`, and in the directories that the manifests there name."""
    newest: Manifest | None = None
    damaged: CorruptStateError | None = None
    pending, seen = list(roots), set[Path]()
    while pending:
        root = pending.pop(0)
        if root in seen:
            continue
        seen.add(root)
        if not root.is_dir():
            if root in roots and newest is None and not pending and damaged is None:
                raise StoreError(
                    f"no store at `{root}`: expected a directory, found "
                    f"{'a file' if root.exists() else 'none'}; check the path"
                )
            continue
        try:
            manifest = ManifestFiles(root).newest()
        except CorruptStateError as error:
            damaged = damaged or error
            continue
        if manifest is None or _is_of_another(newest, manifest, root, is_named=root in roots):
            continue
        newest = manifest if newest is None or manifest.sequence > newest.sequence else newest
        pending.extend(_elsewhere(manifest, roots))
    if newest is None and damaged is not None:
        raise damaged
    if damaged is not None:
        _log.warning("%s; the commit is taken from another path of the store", damaged)
    return newest


def _elsewhere(manifest: Manifest, roots: Sequence[Path]) -> list[Path]:
    """Returns where the paths are of which no data file is in `roots`.

    A directory that was copied or moved does not lead back to where it came from.
    """
    return [
        recorded
        for index, recorded in enumerate(manifest.roots)
        if not any((root / data_file_name(index)).is_file() for root in roots)
    ]


def _is_of_another(
    newest: Manifest | None, manifest: Manifest, root: Path, *, is_named: bool
) -> bool:
    if newest is None or newest.store_id == manifest.store_id:
        return False
    if is_named:
        raise StoreError(
            f"cannot open the paths as one store: expected manifests of store `{newest.store_id}` "
            f"everywhere, found those of `{manifest.store_id}` in `{root}`; name the directories "
            "of one store"
        )
    return True  # another store has taken a place that this one once had


def _located(manifest: Manifest, roots: Sequence[Path]) -> list[Path | None]:
    """Returns the directory of each path: one of `roots` with its data file, or where it was."""
    found: list[Path | None] = []
    for index in range(manifest.num_paths):
        recorded = [manifest.roots[index]] if manifest.roots else []
        candidates = (
            root
            for root in itertools.chain(roots, recorded)
            if (root / data_file_name(index)).is_file()
        )
        found.append(next(candidates, None))
    return found
