"""Casts of parameters that autograd saves: found by where they come from, and made again.

[Note: a cast is found by its graph]
Under autocast the graph would keep a copy in bf16 of every fp32 weight from forward to backward.
What the copy is made of shows in its history: views of nothing but a copy of a parameter. The
parameter's values are there again in backward, so the copy can be made then, with the same bits.
A cast of a frozen parameter has no history, nor has one inside a compiled block: those stay. So
does one whose parameter was edited or updated before the cast was first saved: its node is older.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.graph import Node

from offload.streaming.torch_private import number_of_node
from offload.streaming.unit import Binding, StreamedUnit, Values
from offload.streaming.versions import counter_of

_VIEWS = frozenset(
    f"{name}Backward"
    for name in (
        "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze",
        "Squeeze", "Slice", "Select", "Split", "Unbind", "Expand", "AsStrided",
    )
)  # fmt: skip
_CAST = "ToCopyBackward"
_FIRST_SEEN = "offload.version"
_MOST_PLAIN_DIMENSIONS = 3  # `channels_last` orders the memory of four


@dataclass(slots=True, kw_only=True)
class SavedCast:
    """A saved view of a parameter's cast, without memory.

    Attributes:
        values: Of the parameter, when a cast of it was first saved.
        counter: Shares the version counter of the cast.
    """

    unit: StreamedUnit
    binding: Binding
    values: Values
    counter: torch.Tensor
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def again(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the view of the cast, made again from the unit's bytes."""
        # In memory of its own, of the same dtype too: what is given counts from where that begins.
        whole = self.binding.values_in(base).to(self.dtype, copy=True)
        return whole.as_strided(self.shape, self.stride, self.offset)


class Casts:
    """Finds the casts of the parameters of streamed units."""

    def __init__(self, units: Iterable[StreamedUnit]) -> None:
        self._places = {
            id(binding.parameter): (unit, binding)
            for unit in units
            if not unit.is_wide
            for binding in unit.bindings
            if binding.num_bytes
        }

    def find(self, tensor: torch.Tensor) -> SavedCast | None:
        """Returns what stands for `tensor`, if it is nothing but a parameter's cast."""
        node, is_view = tensor.grad_fn, False
        while node is not None and (kind := node.name().rstrip("0123456789")) in _VIEWS:
            node, is_view = node.next_functions[0][0], True
        if node is None or kind != _CAST:
            return None
        # Of a leaf, which is the parameter itself and no view of it.
        leaf = getattr(node.next_functions[0][0], "variable", None)
        place = self._places.get(id(leaf))
        if place is None or not _shows_all(tensor, place[1].parameter, is_view=is_view):
            return None
        unit, binding = place
        # Autocast keeps a cast for a while: it is of the values that there were then.
        facts: dict[str, Values | None] = cast(Any, node).metadata
        values = facts.setdefault(_FIRST_SEEN, _values_of(binding, node))
        if values is None:
            return None
        return SavedCast(
            unit=unit,
            binding=binding,
            values=values,
            counter=counter_of(tensor),
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def _values_of(binding: Binding, node: Node) -> Values | None:
    """Returns what the parameter has now; None after a change, which the cast may be older than."""
    values = binding.values
    is_older = values.version != binding.seen_version or number_of_node(node) < values.since
    return None if is_older else values


def _shows_all(tensor: torch.Tensor, parameter: torch.Tensor, *, is_view: bool) -> bool:
    """Returns whether the memory under `tensor` is the parameter's, in its order, cast."""
    is_plain = parameter.dim() <= _MOST_PLAIN_DIMENSIONS
    return (
        tensor._version == 0
        and tensor.device == parameter.device
        and tensor.untyped_storage().nbytes() == parameter.numel() * tensor.element_size()
        and (is_plain or (not is_view and tensor.stride() == parameter.stride()))
    )
