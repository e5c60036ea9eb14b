"""What a store holds and whether it is whole, seen from outside."""

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.layout import ModelLayout
from offload.optim.commit_head import CommitHead
from offload.optim.digest import state_digest
from offload.optim.pipeline import parameter_key, state_key
from offload.optim.readers import StateParts
from offload.optim.record_names import parameters_by_record
from offload.runs.run_directory import find_stores, is_run_directory
from offload.sizes import MIB
from offload.storage.dead_stores import find_directories
from offload.storage.engine import Engine
from offload.storage.manifest_files import ManifestFiles
from offload.storage.store import BlockStore
from offload.storage.summary import peek
from offload.storage.verify import Progress, VerifyReport, verify
from offload.streaming.messages import listed

_SCRATCH_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The newest commit of a store."""

    store: str
    schema: int
    step: int | None
    committed_at: str
    """UTC, ISO 8601."""
    parameters: int | None
    records: int
    bytes_by_path: dict[str, int]
    checkpoints: list[str]
    digest: str | None
    """None where the store is no training state."""
    age_s: float = field(compare=False)
    """Since the commit, when it was looked at."""
    owner: str | None
    """The process that owns the store now."""
    checkpoint_steps: dict[str, int | None]
    units: list[dict[str, Any]]
    """Of each unit, in the order of the model: bytes of parameters and state, number of records,
    bytes in blocks by path."""
    torch_threads: int | None
    """Of the process that committed; None where the commit does not say."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What reading every block of a store found."""

    records: int
    bytes: int
    bad: list[dict[str, Any]]

    @property
    def ok(self) -> bool:
        return not self.bad

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def inspect_store(path: Path) -> Inspection:
    """Returns what the store of a run directory, or the store directory `path`, holds.

    Raises:
        ConfigError: `path` is neither.
        StoreError: It has no complete commit.
        CorruptStateError: Stored bytes differ from what was written.
    """
    root = resolve_store(path)
    summary = peek(root)
    layout = _layout_of(summary.head)
    with _opened(root, summary.head) as store:
        digest = _digest(store, layout) if layout else None
        units = _units(store, layout) if layout else []
        checkpoints = {name: head.get("step") for name, head in store.checkpoints().items()}
    return Inspection(
        store=str(root),
        schema=summary.schema,
        step=_step_of(summary.head),
        committed_at=datetime.fromtimestamp(summary.head["committed_at"], tz=UTC).isoformat(),
        parameters=layout.num_parameters if layout else None,
        records=summary.num_records,
        bytes_by_path={str(where): size for where, size in summary.bytes_by_path.items()},
        checkpoints=list(checkpoints),
        digest=digest,
        age_s=max(0.0, time.time() - summary.head["committed_at"]),
        owner=summary.owner.describe() if summary.owner else None,
        checkpoint_steps=checkpoints,
        units=units,
        torch_threads=summary.head.get("torch_threads"),
    )


def verify_store(path: Path, *, progress: Progress | None = None) -> Verification:
    """Reads every block of a store and returns which ones are not what was written.

    Raises:
        ConfigError: `path` is neither a run directory nor a store directory.
        StoreError: It has no complete commit.
    """
    root = resolve_store(path)
    head = peek(root).head
    with _opened(root, head) as store:
        report = verify(store, progress=progress)
    return Verification(
        records=report.num_records,
        bytes=report.num_bytes,
        bad=_bad_blocks(report, _parameters_by_record(head)),
    )


def resolve_store(path: Path) -> Path:
    """Returns the store directory that a run directory names, or `path` itself.

    Raises:
        ConfigError: There is no directory `path`, or there are only stores below it.
    """
    if not path.is_dir():
        raise ConfigError(
            f"cannot find store `{path}`: expected a run directory or a store directory, found "
            f"{'a file' if path.exists() else 'nothing'}; correct the path"
        )
    if is_run_directory(path):
        return (find_stores(path) or (path,))[0]
    below = [found.root for found in find_directories(path)]
    if below and path not in below and not ManifestFiles(path).sequences():
        raise ConfigError(
            f"cannot tell which store in `{path}` is meant: expected a run directory or a store "
            f"directory, found {listed(list(map(str, below)))} in it; name one, such as "
            f"`{below[0]}`"
        )
    return path


def _digest(store: BlockStore, layout: ModelLayout) -> str:
    # Not closed here: tickets refer to the memory until they are collected.
    scratch = memoryview(mmap.mmap(-1, _SCRATCH_BYTES))
    head = CommitHead.from_json(store.head)
    return state_digest(
        layout,
        StateParts(store=store, scratch=scratch),
        steps=head.steps,
        completed_steps=head.step,
    )


def _units(store: BlockStore, layout: ModelLayout) -> list[dict[str, Any]]:
    """Returns where each unit lies; a record of several units counts for the first of them."""
    unit_of_shard = {shard.name: unit.name for unit in layout.units for shard in unit.shards}
    found: dict[str, dict[str, Any]] = {
        unit.name: {
            "unit": unit.name,
            "parameter_bytes": 0,
            "state_bytes": 0,
            "records": 0,
            "bytes_by_path": {},
        }
        for unit in layout.units
    }
    keys = [
        (parameter_key(subgroup), unit_of_shard[subgroup.shard], "parameter_bytes")
        for subgroups in layout.subgroups.values()
        for subgroup in subgroups
    ]
    keys += [
        (state_key(record), unit_of_shard[record.subgroups[0].shard], "state_bytes")
        for record in layout.records
    ]
    for key, unit, kind in keys:
        if key not in store:
            continue
        entry = found[unit]
        entry[kind] += store.num_bytes(key)
        entry["records"] += 1
        for path, num_bytes in store.bytes_by_path(key).items():
            by_path = entry["bytes_by_path"]
            by_path[str(path)] = by_path.get(str(path), 0) + num_bytes
    return list(found.values())


@contextmanager
def _opened(root: Path, head: dict[str, Any]) -> Iterator[BlockStore]:
    names = _parameters_by_record(head)
    describe = (lambda record: names.get(record, "no parameter")) if names else None
    with Engine() as engine:
        store = BlockStore(root, engine=engine, describe=describe)
        store.open(read_only=True)
        try:
            yield store
        finally:
            store.close()


def _parameters_by_record(head: dict[str, Any]) -> dict[str, str]:
    if "layout" not in head:
        return {}
    names: dict[str, str] = {}
    for layout in CommitHead.from_json(head).layouts():
        names.update(parameters_by_record(layout))
    return names


def _layout_of(head: dict[str, Any]) -> ModelLayout | None:
    return ModelLayout.from_json(head["layout"]) if "layout" in head else None


def _step_of(head: dict[str, Any]) -> int | None:
    metadata = head.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("step"), int):
        return int(metadata["step"])
    return head.get("step")


def _bad_blocks(report: VerifyReport, parameters: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "record": bad.record,
            "parameter": parameters.get(bad.record),
            "path": str(bad.path),
            "file": bad.file,
            "offset": bad.offset,
            "reason": bad.reason,
        }
        for bad in report.bad
    ] + [
        {
            "record": None,
            "parameter": None,
            "path": str(bad.path),
            "file": bad.file,
            "offset": None,
            "reason": bad.reason,
        }
        for bad in report.bad_manifests
    ]
