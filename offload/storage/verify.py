"""Reading back every block and manifest of a store, and which are not what was written."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from offload.errors import CorruptStateError, StorageError, StoreError
from offload.sizes import round_up
from offload.storage.extents import Version
from offload.storage.manifest_files import ManifestFiles
from offload.storage.store import BlockStore
from offload.storage.tickets import StoreTicket

_SPAN_BLOCKS = 8
_NUM_SPANS = 3  # read at one time, so that hashing one overlaps reading the others


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBlock:
    """A block whose bytes cannot be had as they were written."""

    record: str
    path: Path
    """The directory, one of the storage paths."""
    file: str
    """Name of the data file in it."""
    offset: int
    """Of the block in the file."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BadManifest:
    """A manifest, of a commit or a checkpoint, that is not as it was written."""

    path: Path
    """The directory, one of the storage paths."""
    file: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What reading everything found."""

    num_records: int
    num_bytes: int
    """In use, of all records."""
    bad: list[BadBlock] = field(default_factory=list)
    bad_manifests: list[BadManifest] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.bad and not self.bad_manifests


Progress = Callable[[int, int], None]
"""Told how many bytes of all are read."""


def verify(store: BlockStore, *, progress: Progress | None = None) -> VerifyReport:
    """Reads every block of every current record of an open store; best one opened read-only.

    Blocks that only a checkpoint keeps are read too, and each manifest on each path: the store
    opens with one that is whole, but the next damage may be to that.

    Raises:
        StoreError: Its owner has committed meanwhile and reused blocks: nothing can be said.
    """
    versions = _versions(store)
    return VerifyReport(
        num_records=len(store.records()),
        num_bytes=sum(kept.version.num_bytes for kept in versions),
        bad=list(bad_blocks(store, progress=progress)),
        bad_manifests=[bad for root in store.roots for bad in _bad_manifests(ManifestFiles(root))],
    )


def bad_blocks(store: BlockStore, *, progress: Progress | None = None) -> Iterator[BadBlock]:
    """Yields the bad blocks of an open store while it is being read."""
    versions = _versions(store)
    all_bytes, done_bytes = sum(kept.version.num_bytes for kept in versions), 0
    span_bytes = _SPAN_BLOCKS * store.block_bytes
    # Not closed here: tickets refer to the memory until they are collected.
    memory = memoryview(mmap.mmap(-1, _NUM_SPANS * span_bytes))
    slots = [memory[at : at + span_bytes] for at in range(0, len(memory), span_bytes)]
    window: list[_Reading] = []
    for index, span in enumerate(_spans(versions, span_bytes)):
        done_bytes += span.num_bytes
        if progress is not None:
            progress(done_bytes, all_bytes)
        if len(window) == _NUM_SPANS:
            yield from _finish(store, window.pop(0))
        window.append(_start(store, span, slots[index % _NUM_SPANS]))
    for reading in window:
        yield from _finish(store, reading)


def _bad_manifests(files: ManifestFiles) -> Iterator[BadManifest]:
    reads = [
        (files.path(sequence), partial(files.read, sequence)) for sequence in files.sequences()
    ]
    reads += [
        (files.checkpoint_path(name), partial(files.read_checkpoint, name))
        for name in files.checkpoint_names()
    ]
    for path, read in reads:
        try:
            read()
        except FileNotFoundError:  # its owner has committed meanwhile
            continue
        except (CorruptStateError, StorageError, StoreError) as error:
            yield BadManifest(path=path.parent, file=path.name, reason=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Some neighbouring blocks of a record."""

    record: str
    checkpoint: str | None
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A version to read."""

    record: str
    checkpoint: str | None
    """None: the current version."""
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A span on its way into a slot."""

    span: _Span
    slot: memoryview
    ticket: StoreTicket


def _versions(store: BlockStore) -> list[_Kept]:
    """Returns the current versions, and those that only checkpoints keep, each once."""
    current = store.current_records()
    found = [_Kept(record=r, checkpoint=None, version=v) for r, v in current.items()]
    seen = {id(version) for version in current.values()}
    for name in store.checkpoints():
        for record, version in store.checkpoint_records(name).items():
            if id(version) not in seen:
                seen.add(id(version))
                found.append(_Kept(record=record, checkpoint=name, version=version))
    return found


def _spans(versions: Sequence[_Kept], span_bytes: int) -> Iterator[_Span]:
    for kept in versions:
        num_bytes = kept.version.num_bytes
        for offset in range(0, num_bytes, span_bytes):
            yield _Span(
                record=kept.record,
                checkpoint=kept.checkpoint,
                offset=offset,
                num_bytes=min(span_bytes, num_bytes - offset),
            )


def _start(store: BlockStore, span: _Span, slot: memoryview) -> _Reading:
    into = slot[: round_up(span.num_bytes, store.alignment)]
    ticket = store.read(
        span.record,
        into,
        offset=span.offset,
        num_bytes=span.num_bytes,
        checkpoint=span.checkpoint,
    )
    return _Reading(span=span, slot=slot, ticket=ticket)


def _finish(store: BlockStore, reading: _Reading) -> Iterator[BadBlock]:
    """Waits for a span; where something in it is bad, reads its blocks one by one."""
    try:
        reading.ticket.wait()
    except (CorruptStateError, StorageError):
        span = reading.span
        for at in range(0, span.num_bytes, store.block_bytes):
            block = _Span(
                record=span.record,
                checkpoint=span.checkpoint,
                offset=span.offset + at,
                num_bytes=min(store.block_bytes, span.num_bytes - at),
            )
            bad = _find_bad(store, block, reading.slot)
            if bad is not None:
                yield bad


def _find_bad(store: BlockStore, block: _Span, slot: memoryview) -> BadBlock | None:
    try:
        _start(store, block, slot).ticket.wait()
    except (CorruptStateError, StorageError) as error:
        index = block.offset // store.block_bytes
        place = store.block_place(block.record, index, checkpoint=block.checkpoint)
        return BadBlock(
            record=block.record,
            path=place.root,
            file=place.file,
            offset=place.offset,
            reason=str(error),
        )
    return None
