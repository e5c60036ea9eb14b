"""What a store holds and whether it is whole, seen from outside."""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.layout import ModelLayout
from offload.optim.commit_head import CommitHead
from offload.optim.digest import state_digest
from offload.optim.readers import StateParts
from offload.optim.record_names import parameters_by_record
from offload.runs.run_directory import find_store, is_run_directory
from offload.sizes import MIB
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.summary import peek
from offload.storage.verify import VerifyReport, verify

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
    return Inspection(
        store=str(root),
        schema=summary.schema,
        step=_step_of(summary.head),
        committed_at=datetime.fromtimestamp(summary.head["committed_at"], tz=UTC).isoformat(),
        parameters=layout.num_parameters if layout else None,
        records=summary.num_records,
        bytes_by_path={str(where): size for where, size in summary.bytes_by_path.items()},
        checkpoints=[],
        digest=_digest(root, layout) if layout else None,
    )


def verify_store(path: Path) -> Verification:
    """Reads every block of a store and returns which ones are not what was written.

    Raises:
        ConfigError: `path` is neither a run directory nor a store directory.
        StoreError: It has no complete commit.
    """
    root = resolve_store(path)
    layout = _layout_of(peek(root).head)
    with _opened(root, layout) as store:
        report = verify(store)
    return Verification(
        records=report.num_records,
        bytes=report.num_bytes,
        bad=_bad_blocks(report, parameters_by_record(layout) if layout else {}),
    )


def resolve_store(path: Path) -> Path:
    """Returns the store directory that a run directory names, or `path` itself.

    Raises:
        ConfigError: There is no directory `path`.
    """
    if not path.is_dir():
        raise ConfigError(
            f"cannot find store `{path}`: expected a run directory or a store directory, found "
            f"{'a file' if path.exists() else 'nothing'}; correct the path"
        )
    return (find_store(path) or path) if is_run_directory(path) else path


def _digest(root: Path, layout: ModelLayout) -> str:
    # Not closed here: tickets refer to the memory until they are collected.
    scratch = memoryview(mmap.mmap(-1, _SCRATCH_BYTES))
    with _opened(root, layout) as store:
        head = CommitHead.from_json(store.head)
        return state_digest(
            layout,
            StateParts(store=store, scratch=scratch),
            steps=head.steps,
            completed_steps=head.step,
        )


@contextmanager
def _opened(root: Path, layout: ModelLayout | None) -> Iterator[BlockStore]:
    describe = _describer(layout) if layout else None
    with Engine() as engine:
        store = BlockStore(root, engine=engine, describe=describe)
        store.open(read_only=True)
        try:
            yield store
        finally:
            store.close()


def _describer(layout: ModelLayout) -> Callable[[str], str]:
    parameters = parameters_by_record(layout)
    return lambda record: parameters.get(record, "no parameter")


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
    ]
