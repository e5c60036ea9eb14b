"""Readers of parameters and state for the digest: resident, or from a store in parts."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from offload.layout import DTYPES, Record, Subgroup
from offload.memory import storage_over
from offload.optim.digest import Bytes
from offload.optim.pipeline import parameter_key, state_key
from offload.sizes import round_up
from offload.storage.store import BlockStore

PART_ELEMENTS = 1 << 20
"""Elements per part: every part of a section has as many, so that sections can be joined."""


class StateParts:
    """Reads a model's state from a store, or from memory where it is resident.

    Ownership: What is yielded is valid until the next part is asked for.
    """

    def __init__(
        self,
        *,
        store: BlockStore | None,
        scratch: memoryview,
        parameters: Mapping[str, torch.Tensor] | None = None,
        records: Mapping[str, torch.Tensor] | None = None,
        cached: Mapping[str, memoryview] | None = None,
    ) -> None:
        """Stores its arguments.

        Args:
            scratch: Page-aligned memory for what is read from the store: at least as large as
                a record, or as a part with a block before and after it.
            parameters: Resident flat shards by name; None: they are read from the store.
            records: Resident records by name; None: they are read from the store.
            cached: Records that are newer in memory than in the store, by name.
        """
        self._store = store
        self._scratch = scratch
        self._parameters = parameters
        self._records = records
        self._cached = cached or {}

    def parameters(self, subgroup: Subgroup, start: int, stop: int) -> Iterator[Bytes]:
        """Yields the bytes of elements `start` to `stop` of the subgroup's parameters."""
        if self._parameters is not None:
            flat = self._parameters[subgroup.shard]
            first = subgroup.start
            yield from _parts_of(flat[first + start : first + stop])
        else:
            yield from self._stored(parameter_key(subgroup), 0, subgroup.itemsize, start, stop)

    def section(
        self, record: Record, subgroup: Subgroup, name: str, start: int, stop: int
    ) -> Iterator[Bytes] | None:
        """Yields the bytes of those elements of a section; None if the record has no state yet."""
        section = record.sections_of(subgroup)[name]
        itemsize = DTYPES[section.dtype].itemsize
        base: torch.Tensor | None = None
        if self._records is not None:
            base = self._records[record.name]
        elif record.name in self._cached:
            base = storage_over(self._cached[record.name])
        if base is not None:
            first = section.offset_bytes
            memory = base[first + start * itemsize : first + stop * itemsize]
            return _parts_of(memory.view(getattr(torch, section.dtype)))
        if self._store is None or state_key(record) not in self._store:
            return None
        return self._stored(state_key(record), section.offset_bytes, itemsize, start, stop)

    def _stored(
        self, key: str, offset_bytes: int, itemsize: int, start: int, stop: int
    ) -> Iterator[Bytes]:
        assert self._store is not None
        for first in range(start, stop, PART_ELEMENTS):
            last = min(first + PART_ELEMENTS, stop)
            begin, end = offset_bytes + first * itemsize, offset_bytes + last * itemsize
            yield self._read_range(self._store, key, begin, end)

    def _read_range(self, store: BlockStore, key: str, begin: int, end: int) -> Bytes:
        """Reads bytes `begin` to `end` of a record: whole blocks, since these have checksums."""
        block_bytes, total = store.block_bytes, store.num_bytes(key)
        first = begin // block_bytes * block_bytes
        last = min(round_up(end, block_bytes), total)
        into = self._scratch[: round_up(last - first, store.alignment)]
        num_bytes = None if last == total else last - first
        store.read(key, into, offset=first, num_bytes=num_bytes).wait()
        return np.frombuffer(into, dtype=np.uint8)[begin - first : end - first]


def _parts_of(values: torch.Tensor) -> Iterator[Bytes]:
    for first in range(0, len(values), PART_ELEMENTS):
        part = values[first : first + PART_ELEMENTS]
        array: Bytes = part.contiguous().view(torch.uint8).numpy()
        yield array
