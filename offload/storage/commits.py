"""Publishing the current versions so that a restart finds them whole."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, StorageError, StoreError
from offload.storage.manifest import SCHEMA, Manifest, encode_manifest
from offload.storage.manifest_files import sync_directory
from offload.storage.store_paths import OpenPath, PathUse
from offload.storage.versions import VersionTable

_RESERVED_KEYS = frozenset({"schema", "committed_at", "store"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """What one commit did."""

    sequence: int
    num_bytes: int
    """Of the manifest, on all paths."""
    duration_s: float


class Commits:
    """Carries out commits, in the only order that survives a crash at each point.

    [Note: order of a commit] Data before names, names before the manifest, the manifest before
    reuse: each sync makes durable what the next step relies on. A sync that failed is final. The
    kernel may have dropped the pages and report success next time, so a retry proves nothing.

    [Note: manifests on several paths] The data of all paths is durable before the first manifest
    has its name, so the commit holds from the first name that is durable. Blocks are reused only
    when every path has its manifest: then none of them can bring an older commit back.

    Concurrency: Any thread; one commit or checkpoint at a time.
    """

    def __init__(
        self,
        paths: Sequence[OpenPath],
        *,
        versions: VersionTable,
        block_bytes: int,
        store_id: str,
    ) -> None:
        self._paths = paths
        self._versions = versions
        self._block_bytes = block_bytes
        self.store_id = store_id
        self._lock = threading.Lock()
        self._head = b""
        self._highest = 0  # of all sequence numbers in the directories
        self._published = 0  # sequence number of the newest complete manifest
        self._unsynced_directories: tuple[Path, ...] = ()
        self._failure: str | None = None
        self._commit_bytes = 0
        self._checkpoints: dict[str, dict[str, Any]] = {}

    @property
    def head(self) -> dict[str, Any] | None:
        return _shown(json.loads(self._head)) if self._head else None

    @property
    def commit_bytes(self) -> int:
        return self._commit_bytes

    def is_superseded(self) -> bool:
        """Returns whether another process has committed since the store was opened."""
        return self._highest_on_paths() > self._highest

    def start_empty(self, created_in: tuple[Path, ...]) -> None:
        """Says that files were created in these directories and nothing is committed yet."""
        self._unsynced_directories = created_in

    def start_after(
        self,
        manifest: Manifest,
        *,
        checkpoints: Mapping[str, Manifest],
        created_in: tuple[Path, ...] = (),
    ) -> None:
        """Says which manifest the store was opened with, and which checkpoints it has."""
        self._published = manifest.sequence
        self._highest = max(manifest.sequence, self._highest_on_paths())
        self._head = json.dumps(manifest.head).encode()
        self._unsynced_directories = created_in
        self._checkpoints = {name: kept.head for name, kept in checkpoints.items()}

    def commit(self, head: Mapping[str, object]) -> CommitReport:
        with self._lock:
            started_s = time.perf_counter()
            self._check_can_commit()
            sequence = self._highest + 1
            head_json = self._encode_head(head)
            num_bytes = self._publish_versions(sequence, head_json)
            for path in self._written_paths():
                path.manifests.delete_before(self._published)
            self._published = self._highest = sequence
            self._head = head_json
            self._commit_bytes += num_bytes
            return CommitReport(
                sequence=sequence,
                num_bytes=num_bytes,
                duration_s=time.perf_counter() - started_s,
            )

    # Checkpoints.

    def checkpoint_heads(self) -> dict[str, dict[str, Any]]:
        """Returns the head of each checkpoint, oldest commit first."""
        with self._lock:
            by_age = sorted(self._checkpoints.items(), key=lambda item: item[1]["committed_at"])
            return {name: _shown(head) for name, head in by_age}

    def save(self, name: str) -> None:
        """Gives the last commit a name, which keeps its blocks; copies none."""
        with self._lock:
            self._check_can_commit()
            if not self._head:
                raise StoreError(
                    f"cannot name checkpoint `{name}` of store `{self._paths[0].root}`: expected a "
                    "commit, found none; commit first"
                )
            versions = self._versions.begin_checkpoint()
            try:
                data = self._encode(versions, self._published, self._head)
                self._publish_everywhere(
                    lambda path: path.manifests.stage_checkpoint(name, data),
                    lambda path: path.manifests.publish_checkpoint(name),
                )
            except BaseException:
                if self._failure is None:
                    self._versions.cancel_commit(versions)
                raise
            self._versions.finish_checkpoint(name, versions)
            self._checkpoints[name] = json.loads(self._head)
            self._commit_bytes += len(data) * len(self._written_paths())

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint; its blocks may be reused once that is durable on every path."""
        with self._lock:
            self._versions.checkpoint(name)
            for path in self._paths:
                path.manifests.delete_checkpoint(name)
            self._versions.drop_checkpoint(name)
            self._checkpoints.pop(name, None)

    # Steps of a commit.

    def _publish_versions(self, sequence: int, head: bytes) -> int:
        versions = self._versions.begin_commit()
        try:
            manifest = self._encode(versions, sequence, head)
            self._sync_or_fail(self._sync_data)
            self._publish_everywhere(
                lambda path: path.manifests.stage(sequence, manifest),
                lambda path: path.manifests.publish(sequence),
            )
        except BaseException:
            if self._failure is None:
                self._versions.cancel_commit(versions)
            raise  # after a failed sync the blocks of both manifests are kept for good
        self._versions.finish_commit(versions)
        return len(manifest) * len(self._written_paths())

    def _publish_everywhere(
        self, stage: Callable[[OpenPath], None], publish: Callable[[OpenPath], None]
    ) -> None:
        """Stages on every path before it publishes on the first; see the note on several paths."""
        for path in self._written_paths():
            try:
                stage(path)
            except StorageError as error:
                others = [p for p in self._written_paths() if p is not path]
                if not others:
                    raise
                path.leave_out(error)
        for path in self._written_paths():
            self._sync_or_fail(lambda path=path: publish(path))  # type: ignore[misc]

    def _sync_data(self) -> None:
        for path in self._paths:
            if path.needs_sync or path.use is not PathUse.LEFT_OUT:
                path.needs_sync = False  # what is written from here on is the next commit's
                path.engine.flush(path.data.file)
        for directory in self._unsynced_directories:
            sync_directory(directory)
        self._unsynced_directories = ()

    def _sync_or_fail(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise

    def _written_paths(self) -> list[OpenPath]:
        return [path for path in self._paths if path.use is not PathUse.LEFT_OUT]

    def _highest_on_paths(self) -> int:
        return max((max(p.manifests.sequences(), default=0) for p in self._paths), default=0)

    def _encode(self, versions: Mapping[str, Any], sequence: int, head: bytes) -> bytes:
        return encode_manifest(
            versions,
            sequence=sequence,
            block_bytes=self._block_bytes,
            num_paths=len(self._paths),
            head=head,
        )

    def _encode_head(self, head: Mapping[str, object]) -> bytes:
        reserved = sorted(_RESERVED_KEYS & head.keys())
        if reserved:
            raise ConfigError(
                f"cannot commit a head with the key `{reserved[0]}`: expected none of "
                f"{sorted(_RESERVED_KEYS)}, which the store adds; rename it"
            )
        roots = [str(path.root.absolute()) for path in self._paths]
        full = {
            **head,
            "schema": SCHEMA,
            "committed_at": time.time(),
            "store": {"id": self.store_id, "paths": roots},
        }
        try:
            _require_text_keys(full)
            return json.dumps(full, sort_keys=True, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"cannot commit this head: expected what JSON can express, found: {error}; "
                "convert it to numbers, strings, lists and dicts with string keys"
            ) from error

    def _check_can_commit(self) -> None:
        if self._failure is not None:
            raise StoreError(
                f"cannot commit to store `{self._paths[0].root}`: expected all earlier syncs to "
                f"have succeeded, found: {self._failure}; what it covered is suspect: end the run, "
                "check the device, and resume from the last commit"
            )


def _require_text_keys(value: object) -> None:
    """Raises TypeError for a key that `json` would turn into another one, such as 2 into "2"."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is `{type(key).__name__}`, not a string")
            _require_text_keys(member)
    elif isinstance(value, list | tuple):
        for member in value:
            _require_text_keys(member)


def _shown(head: dict[str, Any]) -> dict[str, Any]:
    """Returns a head without what is the store's own business."""
    return {key: value for key, value in head.items() if key != "store"}
