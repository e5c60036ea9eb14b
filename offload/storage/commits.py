"""Publishing the current versions so that a restart finds them whole."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, StoreError
from offload.storage.data_file import DataFile
from offload.storage.engine import Engine
from offload.storage.manifest import SCHEMA, encode_manifest
from offload.storage.manifest_files import ManifestFiles, sync_directory
from offload.storage.versions import VersionTable

_RESERVED_KEYS = frozenset({"schema", "committed_at"})
_NUM_PATHS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """What one commit did."""

    sequence: int
    num_bytes: int
    """Of the manifest."""
    duration_s: float


class Commits:
    """Carries out commits, in the only order that survives a crash at each point.

    [Note: order of a commit] Data before names, names before the manifest, the manifest before
    reuse: each sync makes durable what the next step relies on. A sync that failed is final. The
    kernel may have dropped the pages and report success next time, so a retry proves nothing.

    Concurrency: Any thread; one commit at a time.
    """

    def __init__(
        self,
        root: Path,
        *,
        engine: Engine,
        data: DataFile,
        versions: VersionTable,
        block_bytes: int,
    ) -> None:
        self._root = root
        self._engine = engine
        self._data = data
        self._versions = versions
        self._block_bytes = block_bytes
        self._manifests = ManifestFiles(root)
        self._lock = threading.Lock()
        self._head = b""
        self._highest = 0  # of all sequence numbers in the directory
        self._published = 0  # sequence number of the newest complete manifest
        self._unsynced_directories: tuple[Path, ...] = ()
        self._failure: str | None = None
        self._commit_bytes = 0

    @property
    def head(self) -> dict[str, Any] | None:
        return json.loads(self._head) if self._head else None

    @property
    def commit_bytes(self) -> int:
        return self._commit_bytes

    def is_superseded(self) -> bool:
        """Returns whether another process has committed since the store was opened."""
        return max(self._manifests.sequences(), default=0) > self._highest

    def start_empty(self, created_in: tuple[Path, ...]) -> None:
        """Says that files were created in these directories and nothing is committed yet."""
        self._unsynced_directories = created_in

    def start_after(self, sequence: int, head: Mapping[str, object]) -> None:
        """Says which manifest the store was opened with."""
        self._published = sequence
        self._highest = max(self._manifests.sequences(), default=sequence)
        self._head = json.dumps(head).encode()

    def commit(self, head: Mapping[str, object]) -> CommitReport:
        with self._lock:
            started_s = time.perf_counter()
            self._check_can_commit()
            sequence = self._highest + 1
            head_json = _encode_head(head)
            num_bytes = self._publish_versions(sequence, head_json)
            self._manifests.delete_before(self._published)
            self._published = self._highest = sequence
            self._head = head_json
            self._commit_bytes += num_bytes
            return CommitReport(
                sequence=sequence,
                num_bytes=num_bytes,
                duration_s=time.perf_counter() - started_s,
            )

    def _publish_versions(self, sequence: int, head: bytes) -> int:
        versions = self._versions.begin_commit()
        try:
            manifest = encode_manifest(
                versions,
                sequence=sequence,
                block_bytes=self._block_bytes,
                num_paths=_NUM_PATHS,
                head=head,
            )
            self._sync_or_fail(self._sync_data)
            self._manifests.stage(sequence, manifest)
            self._sync_or_fail(lambda: self._manifests.publish(sequence))
        except BaseException:
            if self._failure is None:
                self._versions.cancel_commit(versions)
            raise  # after a failed sync the blocks of both manifests are kept for good
        self._versions.finish_commit(versions)
        return len(manifest)

    def _sync_data(self) -> None:
        self._engine.flush(self._data.file)
        for directory in self._unsynced_directories:
            sync_directory(directory)
        self._unsynced_directories = ()

    def _sync_or_fail(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise

    def _check_can_commit(self) -> None:
        if self._failure is not None:
            raise StoreError(
                f"cannot commit to store `{self._root}`: expected all earlier syncs to have "
                f"succeeded, found: {self._failure}; what it covered is suspect: end the run, "
                "check the device, and resume from the last commit"
            )


def _encode_head(head: Mapping[str, object]) -> bytes:
    reserved = sorted(_RESERVED_KEYS & head.keys())
    if reserved:
        raise ConfigError(
            f"cannot commit a head with the key `{reserved[0]}`: expected neither of "
            f"{sorted(_RESERVED_KEYS)}, which the store adds; rename it"
        )
    full = {**head, "schema": SCHEMA, "committed_at": time.time()}
    try:
        return json.dumps(full, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot commit this head: expected what JSON can express, found: {error}; "
            "convert it to numbers, strings, lists and dicts with string keys"
        ) from error
