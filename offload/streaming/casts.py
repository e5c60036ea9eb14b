"""Casts of parameters that autograd saves: found by where they come from, and made again.

[Note: a cast is found by its graph]
Under autocast the graph would keep a copy in bf16 of every fp32 weight from forward to backward.
What the copy is made of shows in its history: views of nothing but a copy of a parameter. The
parameter's values are there again in backward, so the copy can be made then, with the same bits.
A cast of a frozen parameter has no history, nor has one inside a compiled block: those stay. So
does one whose parameter was edited or updated before the cast was first saved: its node is older.
Where forwards run in several threads, whose nodes have numbers of their own, bits are compared.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.graph import Node

from offload.streaming.graph_moments import Thread
from offload.streaming.torch_private import is_in_backward
from offload.streaming.unit import Binding, CopyState, StreamedUnit, Values
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

    def __init__(self, units: Iterable[StreamedUnit], threads: Collection[Thread]) -> None:
        """Stores its arguments.

        Args:
            units: Whose parameters are cast.
            threads: Those in which graphs were made of them; more may come.
        """
        self._threads = threads
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
        if _FIRST_SEEN not in facts:
            is_of_now = self._is_of_now(unit, binding, node, tensor)
            facts[_FIRST_SEEN] = binding.values if is_of_now else None
        values = facts[_FIRST_SEEN]
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

    def _is_of_now(
        self, unit: StreamedUnit, binding: Binding, node: Node, tensor: torch.Tensor
    ) -> bool:
        """Tells whether a cast that `node` made is of the values that the parameter has now."""
        values = binding.values
        if values.version != binding.seen_version:
            return False
        is_newer = values.since.is_before(node) if len(self._threads) < 2 else None
        if is_newer is None:  # a checkpoint's is needed soon, and looking would wait for a device
            return not is_in_backward() and _has_bits_of(tensor, unit, binding)
        return is_newer


def _has_bits_of(tensor: torch.Tensor, unit: StreamedUnit, binding: Binding) -> bool:
    """Tells whether the memory under `tensor` is what casting the parameter gives now."""
    if unit.state is not CopyState.CLEAN or unit.base is None:
        return False
    with torch.no_grad():
        again = binding.values_in(unit.base).to(tensor.dtype).view(-1)
        found = tensor.detach().as_strided(again.shape, again.stride(), 0)
        return torch.equal(found.view(torch.uint8), again.view(torch.uint8))


def _shows_all(tensor: torch.Tensor, parameter: torch.Tensor, *, is_view: bool) -> bool:
    """Returns whether the memory under `tensor` is the parameter's, in its order, cast."""
    is_plain = parameter.dim() <= _MOST_PLAIN_DIMENSIONS
    return (
        tensor._version == 0
        and tensor.device == parameter.device
        and tensor.untyped_storage().nbytes() == parameter.numel() * tensor.element_size()
        and (is_plain or (not is_view and tensor.stride() == parameter.stride()))
    )
