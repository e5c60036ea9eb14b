"""Which gradients stay in memory, and what the others need on their way to storage and back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.layout import DTYPES, FlatShard, ModelLayout, Subgroup
from offload.layout.units import TRANSFER_ALIGNMENT
from offload.sizes import round_up

SPILL_SLOTS = 2
"""Shards whose spilled gradients are in memory at once: one is filled while another is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPlan:
    """Where the gradients of a model accumulate."""

    dtype: str = "parameter"
    """`"parameter"` or `"float32"`."""
    resident_bytes: int = 0
    """Of the shards whose gradients stay in memory, each padded."""
    spilled: tuple[str, ...] = ()
    """The other trainable shards: their gradients go to storage when the next ones appear."""
    spilled_bytes: int = 0
    """Of all gradients on storage, each subgroup's padded."""
    slot_bytes: int = 0
    """Of one such shard, for the largest."""
    buffer_bytes: int = 0
    """Of one record's gradients in the window, for the largest."""
    place_bytes: int = 0
    """Of one subgroup's gradients on storage, for the largest."""
    num_places: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Memory beside the window."""
        return self.resident_bytes + SPILL_SLOTS * self.slot_bytes

    @property
    def space_bytes(self) -> int:
        """Of the spill files."""
        return self.num_places * self.place_bytes


def keep_gradients(layout: ModelLayout, dtype: str) -> GradientPlan:
    """Returns the plan that keeps every gradient in memory."""
    shards = _trainable(layout)
    resident = sum(gradient_bytes(shard, dtype) for shard in shards)
    return GradientPlan(dtype=dtype, resident_bytes=resident)


def spill_gradients(layout: ModelLayout, dtype: str, *, room_bytes: int = 0) -> GradientPlan:
    """Returns the plan that keeps what `room_bytes` hold beside slots for the rest.

    The first units stay: backward reaches them last, and the update needs them first.
    """
    shards = list(_trainable(layout))
    resident = 0
    while shards and resident + gradient_bytes(shards[0], dtype) <= room_bytes:
        resident += gradient_bytes(shards.pop(0), dtype)
    spilled = tuple(shard.name for shard in shards)
    sizes = _sizes(layout, spilled, dtype)
    buffers = (sum(sizes.get(s.name, 0) for s in record.subgroups) for record in layout.records)
    return GradientPlan(
        dtype=dtype,
        resident_bytes=resident,
        spilled=spilled,
        spilled_bytes=sum(sizes.values()),
        slot_bytes=max((gradient_bytes(shard, dtype) for shard in shards), default=0),
        buffer_bytes=max(buffers, default=0),
        place_bytes=max(sizes.values(), default=0),
        num_places=len(sizes),
    )


def gradient_dtype_of(shard: FlatShard, dtype: str) -> str:
    """Returns the dtype in which a shard's gradients accumulate.

    Args:
        shard: A trainable one.
        dtype: `"parameter"` or `"float32"`.
    """
    return "float32" if dtype == "float32" else shard.dtype


def gradient_bytes(shard: FlatShard, dtype: str) -> int:
    """Returns the bytes of a shard's gradients, padded."""
    itemsize = DTYPES[gradient_dtype_of(shard, dtype)].itemsize
    return round_up(shard.num_elements * itemsize, TRANSFER_ALIGNMENT)


def subgroup_gradient_bytes(layout: ModelLayout, subgroup: Subgroup, dtype: str) -> int:
    """Returns the bytes of a subgroup's gradients, padded."""
    itemsize = DTYPES[gradient_dtype_of(layout.shards[subgroup.shard], dtype)].itemsize
    return round_up(subgroup.num_elements * itemsize, TRANSFER_ALIGNMENT)


def spilled_sizes(layout: ModelLayout, plan: GradientPlan) -> dict[str, int]:
    """Returns the bytes of the gradients of each subgroup that is spilled, padded, by name."""
    return _sizes(layout, plan.spilled, plan.dtype)


def _sizes(layout: ModelLayout, shards: Sequence[str], dtype: str) -> dict[str, int]:
    return {
        subgroup.name: subgroup_gradient_bytes(layout, subgroup, dtype)
        for name in shards
        for subgroup in layout.subgroups[name]
    }


def _trainable(layout: ModelLayout) -> Iterator[FlatShard]:
    return (shard for shard in layout.shards.values() if shard.is_trainable)


def may_spill(parameters: str, optimizer: str, *, overlap: str) -> bool:
    """Returns whether gradients can go to storage: there is some, and no update under backward.

    An update under backward takes gradients where they appear; on storage they would only be read
    back at once.
    """
    return "storage" in (parameters, optimizer) and overlap in ("none", "forward")
