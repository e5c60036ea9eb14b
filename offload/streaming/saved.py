"""Saved-tensor hooks that keep autograd from holding slots.

[Note: delegating hooks]
torch calls only the top pair of hooks. Ours pack a tensor that lies in a unit's slot, or is a
parameter's cast, into a handle, and pass every other tensor on to the pair below (an activation
checkpoint's, the user's), so that those keep their effect. A handle fetches its unit again in
backward: any unit may be evicted at any time when no call holds it.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.streaming.casts import Casts, SavedCast
from offload.streaming.residency import Residency
from offload.streaming.torch_private import (
    PackHook,
    UnpackHook,
    has_memory,
    is_in_backward,
    negative_view,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from offload.streaming.unit import Binding, StreamedUnit
from offload.streaming.versions import counter_of, modified_message

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(slots=True, kw_only=True)
class SavedParameter:
    """A saved view of a unit's slot, without the slot.

    Attributes:
        counter: Shares the version counter of an alias that has one of its own, such as
            `parameter.data`; None where it is the parameter's.
        version: Of the counter when the view was saved.
    """

    unit: StreamedUnit
    binding: Binding
    counter: torch.Tensor | None
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool


@dataclass(slots=True, kw_only=True)
class SavedTensor:
    """Any other tensor, and the version that the graph saw."""

    tensor: torch.Tensor
    version: int


@dataclass(slots=True, kw_only=True)
class Delegated:
    """A tensor that the hooks below have packed."""

    packed: Any
    unpack: UnpackHook


class HookPair(ABC):
    """A pair of hooks that knows what lies below it."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor, below: tuple[PackHook, UnpackHook] | None) -> Any:
        """Returns what the graph keeps in the place of `tensor`."""

    @abstractmethod
    def unpack(self, packed: Any) -> torch.Tensor:
        """Returns the tensor again.

        Raises:
            RuntimeError: It was modified in place since it was saved.
        """

    def push(self) -> bool:
        """Puts the hooks on top of torch's stack, unless they are there already.

        Returns:
            Whether they were pushed: then the caller pops them.
        """
        below = top_saved_tensor_hooks()
        if below is not None and getattr(below[0], "owner", None) is self:
            return False
        push_saved_tensor_hooks(_Pack(self, below), self.unpack)
        return True


class SavedTensorHooks(HookPair):
    """The pair of hooks of one residency.

    [Note: gradients of gradients]
    Under `create_graph` backward records a graph of its own, of the weights that it unpacks. So the
    first of them puts the hooks on the stack of the node that runs: what that saves are handles
    again, and its graph holds no slots either. torch restores the stack when the node has ended.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._casts = Casts(residency.units, residency.threads)

    def pack(self, tensor: torch.Tensor, below: tuple[PackHook, UnpackHook] | None) -> Any:
        if _is_plain(tensor) and has_memory(tensor):
            unit = self._residency.unit_of(tensor)
            if unit is not None:
                return self._handle_of(tensor, unit)
            cast = self._casts.find(tensor)
            if cast is not None:
                return cast
        return pack_below(tensor, below)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedParameter):
            return self._restore(packed)
        if isinstance(packed, SavedCast):
            return self._cast_again(packed)
        return unpack_below(packed)

    def _handle_of(self, tensor: torch.Tensor, unit: StreamedUnit) -> SavedParameter:
        offset = int(tensor.storage_offset())
        binding = unit.binding_at(offset * tensor.element_size())
        version = binding.parameter._version
        # What backward saves was unpacked from the parameter, whatever its own counter says.
        is_own = tensor._version != version and not is_in_backward()
        return SavedParameter(
            unit=unit,
            binding=binding,
            counter=counter_of(tensor) if is_own else None,
            version=tensor._version if is_own else version,
            dtype=tensor.dtype,
            offset=offset,
            shape=tensor.shape,
            stride=tensor.stride(),
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def _restore(self, saved: SavedParameter) -> torch.Tensor:
        _require_version(saved.binding, saved.version, counter=saved.counter)
        if is_in_backward() and torch.is_grad_enabled():  # see [Note: gradients of gradients]
            self.push()
        base = self._residency.fetch(saved.unit, is_backward=True)
        found = base.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)
        found = found.conj() if saved.is_conj else found
        return negative_view(found) if saved.is_neg else found

    def _cast_again(self, saved: SavedCast) -> torch.Tensor:
        found = saved.counter._version
        if found:
            what = f"the {saved.dtype} cast of parameter `{saved.binding.name}`"
            raise RuntimeError(modified_message(what, found=found, expected=0))
        _require_version(saved.binding, saved.values.version)
        base = self._residency.fetch(saved.unit, is_backward=True)
        if saved.values != saved.binding.values:
            raise RuntimeError(
                f"cannot cast parameter `{saved.binding.name}` to {saved.dtype} again for "
                "backward: expected the values of this graph's forward, found an edit through "
                "`.data` between; run the forward again"
            )
        return saved.again(base)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is as torch's own: a class derived from these may say what operations do."""
    cls = type(tensor)
    return cls in _PLAIN or any(_operates_as(cls, plain) for plain in _PLAIN)


def _operates_as(cls: type[torch.Tensor], plain: type[torch.Tensor]) -> bool:
    names = ("__torch_function__", "__torch_dispatch__")
    own, expected = ([getattr(each, name) for name in names] for each in (cls, plain))
    # Class methods are bound anew to each class.
    return [getattr(f, "__func__", f) for f in own] == [getattr(f, "__func__", f) for f in expected]


def _require_version(
    binding: Binding, expected: int, *, counter: torch.Tensor | None = None
) -> None:
    found = (binding.parameter if counter is None else counter)._version
    if found != expected:
        what = f"parameter `{binding.name}`" if counter is None else f"an alias of `{binding.name}`"
        message = modified_message(what, found=found, expected=expected)
        raise RuntimeError(
            f"{message}. An optimizer step or an edit came between this graph's forward and "
            "its backward; run the forward again"
        )


@contextlib.contextmanager
def watching(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Calls `note` with each tensor that no hook at the bottom of the stack sees.

    These are those that a checkpoint computed again, and those that are moved away and back.
    """
    _watchers.append(note)
    try:
        yield
    finally:
        _watchers.remove(note)


def is_watched() -> bool:
    """Returns whether someone counts what autograd keeps alive."""
    return bool(_watchers)


def note_unseen(tensor: torch.Tensor) -> None:
    """Tells those who are watching of a tensor that autograd keeps alive for now."""
    for note in _watchers:
        note(tensor)


_watchers: list[Callable[[torch.Tensor], None]] = []


def pack_below(tensor: torch.Tensor, below: tuple[PackHook, UnpackHook] | None) -> Any:
    """Packs a tensor that is not a pair's own: by the hooks below it, if there are any."""
    if _watchers and is_in_backward():
        note_unseen(tensor)
    if below is None:
        # Detached: the graph would keep itself alive through an output that it saved.
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        return SavedTensor(tensor=kept, version=tensor._version)
    return Delegated(packed=below[0](tensor), unpack=below[1])


def unpack_below(packed: Any) -> torch.Tensor:
    """Returns what `pack_below` packed."""
    if isinstance(packed, Delegated):
        return packed.unpack(packed.packed)
    assert isinstance(packed, SavedTensor)
    tensor, found = packed.tensor, packed.tensor._version
    if found != packed.version:
        what = f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
        raise RuntimeError(modified_message(what, found=found, expected=packed.version))
    return tensor


class PassOn(HookPair):
    """Hands everything to the hooks below, and tells those who are watching."""

    def pack(self, tensor: torch.Tensor, below: tuple[PackHook, UnpackHook] | None) -> Any:
        return pack_below(tensor, below)

    def unpack(self, packed: Any) -> torch.Tensor:
        return unpack_below(packed)


class _Pack:
    """The pack hook, which knows whose it is and what lies below it."""

    __slots__ = ("below", "owner")

    def __init__(self, owner: HookPair, below: tuple[PackHook, UnpackHook] | None) -> None:
        self.owner = owner
        self.below = below

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.owner.pack(tensor, self.below)
