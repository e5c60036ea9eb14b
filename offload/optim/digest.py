"""`state_digest`: one number over parameters and optimizer state, however they are stored.

xxh3-128, little endian, over each parameter in code-point order of its name: name, 0x00; dtype as
in safetensors, 0x00; number of dimensions u32; sizes u64; parameter bytes in C order; if it is
trainable: its own step u64, the fp32 master, then the state of its update rule in code-point order
(such as exp_avg, exp_avg_sq), each as name, 0x00, fp32 bytes (zeros where there are none yet). At
the end the number of completed steps u64.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from offload.layout import DTYPES, RULES, ModelLayout, PlacedParameter, Record, Subgroup

Bytes = npt.NDArray[np.uint8]

_ZEROS = np.zeros(1 << 20, dtype=np.uint8)


class StateReader(Protocol):
    """Reads parts of the parameters and the optimizer state, wherever they live."""

    def parameters(self, subgroup: Subgroup, start: int, stop: int) -> Iterator[Bytes]:
        """Yields the bytes of elements `start` to `stop` of the subgroup's parameters."""
        ...

    def section(
        self, record: Record, subgroup: Subgroup, name: str, start: int, stop: int
    ) -> Iterator[Bytes] | None:
        """Yields the bytes of those elements of a section; None if the record has no state yet."""
        ...


def state_digest(
    layout: ModelLayout, reader: StateReader, *, steps: Mapping[str, int], completed_steps: int
) -> str:
    """Returns the digest in hexadecimal.

    Args:
        steps: Updates that each trainable parameter has had; 0 for those left out.
        completed_steps: Optimizer steps of the whole model.
    """
    digest = xxhash.xxh3_128()
    record_of = {s.name: record for record in layout.records for s in record.subgroups}
    for name, (shard, placed) in layout.parameters.items():
        digest.update(_header(placed))
        pieces = list(_pieces(layout.subgroups[shard.name], placed))
        for subgroup, start, stop in pieces:
            for part in reader.parameters(subgroup, start, stop):
                _update(digest, part)
        if not shard.is_trainable:
            continue
        digest.update(struct.pack("<Q", steps.get(name, 0)))
        for subgroup, start, stop in pieces:
            for part in _master(
                reader, record_of[subgroup.name], subgroup, start, stop, shard.dtype
            ):
                _update(digest, part)
        for section in sorted(RULES[layout.rule_of(name)]):
            digest.update(section.encode() + b"\0")
            for subgroup, start, stop in pieces:
                for part in _fp32(reader, record_of[subgroup.name], subgroup, section, start, stop):
                    _update(digest, part)
    digest.update(struct.pack("<Q", completed_steps))
    return digest.hexdigest()


def _update(digest: Any, part: Bytes) -> None:
    digest.update(part)


def _header(placed: PlacedParameter) -> bytes:
    facts = placed.facts
    sizes = struct.pack(f"<I{len(facts.shape)}Q", len(facts.shape), *facts.shape)
    code = DTYPES[facts.dtype].safetensors
    return facts.name.encode() + b"\0" + code.encode() + b"\0" + sizes


def _pieces(
    subgroups: tuple[Subgroup, ...], placed: PlacedParameter
) -> Iterator[tuple[Subgroup, int, int]]:
    """Yields the parts of a parameter: subgroup and element range in it."""
    for subgroup in subgroups:
        start, stop = max(placed.start, subgroup.start), min(placed.stop, subgroup.stop)
        if start < stop:
            yield subgroup, start - subgroup.start, stop - subgroup.start


def _fp32(
    reader: StateReader, record: Record, subgroup: Subgroup, name: str, start: int, stop: int
) -> Iterator[Bytes]:
    parts = reader.section(record, subgroup, name, start, stop)
    if parts is not None:
        yield from parts
        return
    left = (stop - start) * 4
    while left > 0:
        yield _ZEROS[:left]
        left -= len(_ZEROS)


def _master(
    reader: StateReader, record: Record, subgroup: Subgroup, start: int, stop: int, dtype: str
) -> Iterator[Bytes]:
    """Yields the fp32 master: stored, joined from its halves, or the parameter itself."""
    if dtype == "float32":
        yield from reader.parameters(subgroup, start, stop)
        return
    sections = record.sections_of(subgroup)
    if "master" in sections:
        stored = reader.section(record, subgroup, "master", start, stop)
        if stored is not None:
            yield from stored
            return
    lows = None
    if "master_low" in sections:
        lows = reader.section(record, subgroup, "master_low", start, stop)
    for part in reader.parameters(subgroup, start, stop):
        high = _as_fp32_bits(part, dtype)
        if lows is not None:
            low = next(lows).view(np.int16)
            with np.errstate(over="ignore"):
                high = high + low.astype(np.int32).view(np.uint32)
        yield high.view(np.uint8)


def _as_fp32_bits(values: Bytes, dtype: str) -> npt.NDArray[np.uint32]:
    if dtype == "bfloat16":
        return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return values.view(np.float16).astype(np.float32).view(np.uint32)
