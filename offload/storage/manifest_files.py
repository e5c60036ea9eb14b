"""The manifest files of a store directory: written durably, the newest complete one found."""

import logging
import os
import re
from pathlib import Path

from offload.errors import ConfigError, CorruptStateError, StorageError
from offload.storage.manifest import Manifest, decode_manifest

_log = logging.getLogger("offload.storage")

_NAME = re.compile(r"manifest-(\d{10})")
_CHECKPOINT_PREFIX = "checkpoint-"
_CHECKPOINT = re.compile(r"checkpoint-([A-Za-z0-9][A-Za-z0-9._+-]{0,99})")
_TEMPORARY_SUFFIX = ".tmp"
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def is_manifest_name(name: str) -> bool:
    """Returns whether `name` is that of a manifest, complete or temporary."""
    return _NAME.fullmatch(name.removesuffix(_TEMPORARY_SUFFIX)) is not None


def is_checkpoint_file(name: str) -> bool:
    """Returns whether `name` is that of a checkpoint's manifest, complete or temporary."""
    return _CHECKPOINT.fullmatch(name) is not None


def require_checkpoint_name(name: str) -> None:
    """Raises ConfigError unless `name` can be that of a checkpoint."""
    if _CHECKPOINT.fullmatch(_CHECKPOINT_PREFIX + name) is None or name.endswith(_TEMPORARY_SUFFIX):
        raise ConfigError(
            f"cannot name a checkpoint `{name}`: expected at most 100 letters, digits and `._+-`, "
            "a letter or digit first, and no `.tmp` at the end; choose another name"
        )


class ManifestFiles:
    """The manifests in one directory, by sequence number.

    Concurrency: One writer; any number of readers, in other processes too.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def root(self) -> Path:
        return self._root

    def path(self, sequence: int) -> Path:
        return self._root / f"manifest-{sequence:010d}"

    def sequences(self) -> list[int]:
        """Returns the numbers of the manifests under their final names, newest first."""
        try:
            names = [path.name for path in self._root.iterdir()]
        except OSError as error:
            raise _failed("list directory", self._root, error) from error
        return sorted((int(m[1]) for m in map(_NAME.fullmatch, names) if m), reverse=True)

    def newest(self) -> Manifest | None:
        """Returns the newest complete manifest, or None where there is no manifest at all.

        Each damaged one on the way is skipped with a warning.

        Raises:
            CorruptStateError: There are manifests and none is complete.
            StoreError: A newer `offload` wrote the newest one.
        """
        damaged: CorruptStateError | None = None
        sequences = self.sequences()
        for sequence in sequences:
            try:
                manifest = self.read(sequence)
            except CorruptStateError as error:
                _log.warning("%s; trying the one before it", error)
                damaged = damaged or error
            except FileNotFoundError:
                return self.newest()  # a running owner has committed and deleted it meanwhile
            else:
                return manifest
        if damaged is not None:
            raise CorruptStateError(
                f"no manifest in `{self._root}` is complete: expected one of {len(sequences)} to "
                f"be, found: {damaged}; restore the directory from a copy, or start a new store"
            ) from damaged
        return None

    def read(self, sequence: int) -> Manifest:
        """Returns one manifest, checked.

        Raises:
            CorruptStateError: It is not whole, or is another commit's under this name.
            FileNotFoundError: It is not there.
        """
        path = self.path(sequence)
        manifest = _read(path)
        if manifest.sequence != sequence:
            raise CorruptStateError(
                f"manifest `{path}` is damaged: expected sequence {sequence}, found "
                f"{manifest.sequence}; an earlier commit or checkpoint of the store may be whole"
            )
        return manifest

    def stage(self, sequence: int, data: bytes) -> None:
        """Writes a manifest under its temporary name; nothing is durable or published yet.

        Raises:
            StorageError: The write failed; the temporary file is gone and the caller may retry.
        """
        _stage(self.path(sequence), data)

    def publish(self, sequence: int) -> None:
        """Makes a staged manifest durable and gives it its final name.

        Raises:
            StorageError: A sync or the rename failed: whether a restart finds this manifest or
                the one before is unknown from here on, so blocks of neither may be reused.
        """
        _publish(self.path(sequence))

    # Checkpoints: manifests under a name.

    def checkpoint_path(self, name: str) -> Path:
        return self._root / (_CHECKPOINT_PREFIX + name)

    def checkpoint_names(self) -> list[str]:
        """Returns the names of the checkpoints in code-point order."""
        try:
            names = [path.name for path in self._root.iterdir()]
        except OSError as error:
            raise _failed("list directory", self._root, error) from error
        found = (match[1] for match in map(_CHECKPOINT.fullmatch, names) if match)
        return sorted(name for name in found if not name.endswith(_TEMPORARY_SUFFIX))

    def read_checkpoint(self, name: str) -> Manifest:
        """Returns the manifest of a checkpoint, checked; raises as `read`."""
        return _read(self.checkpoint_path(name))

    def stage_checkpoint(self, name: str, data: bytes) -> None:
        """Writes a checkpoint's manifest under its temporary name; raises as `stage`."""
        _stage(self.checkpoint_path(name), data)

    def publish_checkpoint(self, name: str) -> None:
        """Makes it durable and gives it its final name, over one of that name; as `publish`."""
        _publish(self.checkpoint_path(name))

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint's manifest for good: its blocks may be reused afterwards.

        Raises:
            StorageError: It may still be there after a crash.
        """
        path = self.checkpoint_path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _failed("delete checkpoint", path, error) from error
        sync_directory(self._root)

    def delete_before(self, sequence: int) -> None:
        """Deletes manifests older than `sequence`; a failure only leaves files behind."""
        for old in self.sequences():
            if old < sequence:
                _try_delete(self.path(old))

    def delete_temporaries(self) -> None:
        """Deletes what commits that never finished left under temporary names."""
        for path in self._root.glob("*" + _TEMPORARY_SUFFIX):
            if is_manifest_name(path.name) or is_checkpoint_file(path.name):
                _try_delete(path)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable.

    Raises:
        StorageError: It failed, which is final: the names may or may not be on storage.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _failed("sync directory", path, error) from error


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + _TEMPORARY_SUFFIX)


def _read(path: Path) -> Manifest:
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
        try:  # a directory opens, but not as a file
            with os.fdopen(fd, "rb", closefd=False) as file:
                data = file.read()
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _failed("read manifest", path, error) from error
    return decode_manifest(data, name=str(path))


def _stage(final: Path, data: bytes) -> None:
    path = _temporary(final)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
    except OSError as error:
        _try_delete(path)
        raise _failed("write manifest", path, error) from error


def _publish(final: Path) -> None:
    path = _temporary(final)
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        path.rename(final)
    except OSError as error:
        raise _failed("publish manifest", path, error) from error
    sync_directory(final.parent)


def _try_delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot delete `%s`: %s; it is of no further use", path, error.strerror)


def _failed(what: str, path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot {what} `{path}`: expected success, found {error.strerror or error}; "
        "check the file system and its free space",
        errno=error.errno,
    )
