"""The bytes of a manifest: which blocks are the state. `docs/state-format.md` describes them.

Encoding and decoding only: no file is touched here.
"""

import itertools
import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from offload.errors import CorruptStateError, StoreError
from offload.sizes import round_up
from offload.storage.extents import Extent, Version, num_blocks_for

SCHEMA = 2
"""What is written. Schema 1 had the same bytes and one path, and its head did not say `store`."""
_READABLE = (1, 2)

_MOST_PATHS = 1024
_MOST_BLOCKS = 1 << 43
"""Of one data file: offsets of 4 KiB blocks below it fit a signed 64-bit number with room."""
_MAGIC = b"OFFLDMAN"
# Of every schema: magic, schema, zero or more of the schema's own, size of the whole file.
_FRAME = struct.Struct("<8sIIQ")
_COUNTS = struct.Struct("<7Q")
_RECORD = struct.Struct("<QII")
_EXTENT = struct.Struct("<QII")
_CHECKSUM = struct.Struct("<Q")
_HEADER_BYTES = _FRAME.size + _COUNTS.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one commit published."""

    sequence: int
    """Number of the commit within its store, from 1; the highest complete one wins."""
    block_bytes: int
    num_paths: int
    head: dict[str, Any]
    """JSON: `schema`, `committed_at`, `store` and what the commit was given."""
    records: dict[str, Version]
    store_id: str | None = None
    """The same in all manifests of a store; None under schema 1."""
    roots: tuple[Path, ...] = ()
    """The store's directories by path when it was written; they may have moved since."""

    def uses(self, path_index: int) -> bool:
        """Returns whether a block of a path belongs to it."""
        return self.end_block(path_index) > 0

    def end_block(self, path_index: int) -> int:
        """Returns how many blocks the data file of a path has at least."""
        return max(
            (
                extent.end_block
                for version in self.records.values()
                for extent in version.extents
                if extent.path_index == path_index
            ),
            default=0,
        )


def encode_manifest(
    records: Mapping[str, Version],
    *,
    sequence: int,
    block_bytes: int,
    num_paths: int,
    head: bytes,
) -> bytes:
    """Returns the bytes of a manifest, records in code-point order of their names.

    Args:
        records: What it publishes.
        sequence: Number of the commit.
        block_bytes: Of the store.
        num_paths: Of the store.
        head: A JSON object in UTF-8.
    """
    names = sorted(records)
    encoded_names = [name.encode() for name in names]
    versions = [records[name] for name in names]
    record_table = b"".join(
        _RECORD.pack(version.num_bytes, len(name), len(version.extents))
        for name, version in zip(encoded_names, versions, strict=True)
    )
    extent_table = b"".join(
        _EXTENT.pack(extent.first_block, extent.num_blocks, extent.path_index)
        for version in versions
        for extent in version.extents
    )
    checksum_table = b"".join(
        struct.pack(f"<{len(version.checksums)}Q", *version.checksums) for version in versions
    )
    name_table = b"".join(encoded_names)
    parts = (_padded(head), record_table, extent_table, checksum_table, _padded(name_table))
    file_bytes = _HEADER_BYTES + sum(map(len, parts)) + _CHECKSUM.size
    frame = _FRAME.pack(_MAGIC, SCHEMA, num_paths, file_bytes)
    counts = _COUNTS.pack(
        sequence,
        block_bytes,
        len(head),
        len(names),
        len(extent_table) // _EXTENT.size,
        len(checksum_table) // _CHECKSUM.size,
        len(name_table),
    )
    body = b"".join((frame, counts, *parts))
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def decode_manifest(data: bytes, *, name: str) -> Manifest:
    """Returns the manifest that `data` holds; every number in it has been checked.

    Args:
        data: The whole file.
        name: Of the file, for messages.

    Raises:
        CorruptStateError: The bytes are not those of a whole manifest.
        StoreError: A newer `offload` wrote it.
    """
    _check_frame(data, name)
    try:
        return _Decoder(data, name).manifest()
    except (struct.error, ValueError, RecursionError) as error:
        raise _corrupt(name, "tables that agree with each other", str(error)) from error


class _Decoder:
    """Reads the parts of one manifest in the order in which they are stored."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self._at = _HEADER_BYTES
        (
            self._sequence,
            self._block_bytes,
            self._head_bytes,
            self._num_records,
            self._num_extents,
            self._num_checksums,
            self._name_bytes,
        ) = _COUNTS.unpack_from(data, _FRAME.size)
        _, self._schema, self._num_paths, _ = _FRAME.unpack_from(data)

    def manifest(self) -> Manifest:
        self._check_counts()
        head = self._decode_head()
        rows = list(_RECORD.iter_unpack(self._take(self._num_records * _RECORD.size)))
        extents = [
            Extent(first_block=first, num_blocks=count, path_index=path)
            for first, count, path in _EXTENT.iter_unpack(
                self._take(self._num_extents * _EXTENT.size)
            )
        ]
        checksums = struct.unpack(
            f"<{self._num_checksums}Q", self._take(self._num_checksums * _CHECKSUM.size)
        )
        names = self._decode_names([row[1] for row in rows])
        store_id, roots = self._decode_identity(head)
        return Manifest(
            sequence=self._sequence,
            block_bytes=self._block_bytes,
            num_paths=self._num_paths,
            head=head,
            records=self._versions(names, rows, extents, checksums),
            store_id=store_id,
            roots=roots,
        )

    def _decode_identity(self, head: Mapping[str, Any]) -> tuple[str | None, tuple[Path, ...]]:
        if self._schema == 1 or "store" not in head:
            if self._num_paths != 1:
                raise ValueError(f"{self._num_paths} paths without their directories")
            return None, ()
        store = head["store"]
        if not isinstance(store, dict) or not isinstance(store.get("id"), str):
            raise ValueError("a head whose `store` has no `id`")
        paths = store.get("paths")
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise ValueError("a head whose `store` has no `paths`")
        if len(paths) != self._num_paths:
            raise ValueError(f"{len(paths)} directories for {self._num_paths} paths")
        return store["id"], tuple(map(Path, paths))

    def _check_counts(self) -> None:
        expected = (
            _HEADER_BYTES
            + round_up(self._head_bytes, 8)
            + self._num_records * _RECORD.size
            + self._num_extents * _EXTENT.size
            + self._num_checksums * _CHECKSUM.size
            + round_up(self._name_bytes, 8)
            + _CHECKSUM.size
        )
        if expected != len(self._data):
            raise ValueError(f"counts that need {expected} bytes")
        if self._block_bytes == 0 or self._block_bytes % 4096 or self._sequence == 0:
            raise ValueError("a block size that is no multiple of 4096, or a sequence of 0")
        if not 1 <= self._num_paths <= _MOST_PATHS:
            raise ValueError(f"{self._num_paths} paths")

    def _take(self, num_bytes: int, *, padded: bool = False) -> bytes:
        part = self._data[self._at : self._at + num_bytes]
        self._at += round_up(num_bytes, 8) if padded else num_bytes
        return part

    def _decode_head(self) -> dict[str, Any]:
        head = json.loads(self._take(self._head_bytes, padded=True))
        if not isinstance(head, dict):
            raise ValueError("a head that is no JSON object")
        return head

    def _decode_names(self, lengths: list[int]) -> list[str]:
        if sum(lengths) != self._name_bytes:
            raise ValueError(f"names of {sum(lengths)} bytes in all")
        names = [self._take(length).decode() for length in lengths]
        if any(left >= right for left, right in itertools.pairwise(names)):
            raise ValueError("names that are not in order, or one twice")
        return names

    def _versions(
        self,
        names: list[str],
        rows: list[tuple[Any, ...]],
        extents: list[Extent],
        checksums: tuple[int, ...],
    ) -> dict[str, Version]:
        records = {}
        extent_at = checksum_at = 0
        for name, (num_bytes, _, num_extents) in zip(names, rows, strict=True):
            num_blocks = num_blocks_for(num_bytes, self._block_bytes)
            version = Version(
                num_bytes=num_bytes,
                extents=tuple(extents[extent_at : extent_at + num_extents]),
                checksums=array("Q", checksums[checksum_at : checksum_at + num_blocks]),
            )
            if version.num_blocks != num_blocks or len(version.checksums) != num_blocks:
                raise ValueError(f"extents or checksums of `{name}` that do not fit its size")
            extent_at += num_extents
            checksum_at += num_blocks
            records[name] = version
        if extent_at != len(extents) or checksum_at != len(checksums):
            raise ValueError("extents or checksums that belong to no record")
        self._check_extents(extents)
        return records

    def _check_extents(self, extents: Sequence[Extent]) -> None:
        by_place = sorted(extents, key=lambda extent: (extent.path_index, extent.first_block))
        for left, right in itertools.pairwise(by_place):
            if left.path_index == right.path_index and left.end_block > right.first_block:
                raise ValueError(f"block {right.first_block} twice")
        for e in extents:
            if e.path_index >= self._num_paths or e.num_blocks == 0:
                raise ValueError("an extent that is empty or on a path that does not exist")
            if e.end_block * self._block_bytes >= 1 << 62 or e.end_block > _MOST_BLOCKS:
                raise ValueError(f"block {e.first_block}, beyond what a file can have")


def _check_frame(data: bytes, name: str) -> None:
    """Checks what all schemas share, so that damage is not taken for a newer schema."""
    if len(data) < _HEADER_BYTES + _CHECKSUM.size:
        raise _corrupt(name, f"at least {_HEADER_BYTES + _CHECKSUM.size} bytes", f"{len(data)}")
    magic, schema, _, file_bytes = _FRAME.unpack_from(data)
    if magic != _MAGIC:
        raise _corrupt(name, f"the magic {_MAGIC!r}", repr(magic))
    if file_bytes != len(data):
        raise _corrupt(name, f"{file_bytes} bytes", f"{len(data)}")
    (stored,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    found = xxh3_64_intdigest(memoryview(data)[: -_CHECKSUM.size])
    if stored != found:
        raise _corrupt(name, f"xxh3-64 {stored:016x}", f"{found:016x}")
    if schema not in _READABLE:
        raise StoreError(
            f"cannot read manifest `{name}`: expected schema {SCHEMA} or older, found {schema}; "
            "open the store with the version of `offload` that wrote it, or a newer one"
        )


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 8)


def _corrupt(name: str, expected: str, found: str) -> CorruptStateError:
    return CorruptStateError(
        f"manifest `{name}` is damaged: expected {expected}, found {found}; "
        "an earlier commit or checkpoint of the store may be whole"
    )
