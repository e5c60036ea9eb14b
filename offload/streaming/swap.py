"""The class swap: modules whose calls fetch their unit first.

[Note: why classes are swapped]
Module hooks around units miss recomputation inside a layer's own `forward`, early stops of
activation checkpoints, and compiled callables, and then give wrong gradients in silence. A
dynamic subclass that overrides `__call__` is outside all of these, and since the link to the
engine is a weak registry, deep copies and pickles are plain modules.

[Note: nothing of the engine is traced]
What a compiler traces becomes the way in which a graph finds its inputs. A look at the registry
would let it find a module by its place there, and one block's graph, reused for the next, would
read the first one's parameters. So under a compiler only the class is asked.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from offload.errors import StoreError

Call = Callable[..., Any]


class Attachment(Protocol):
    """What a swapped module does around its call."""

    is_unit: bool

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def fill_state_dict(self, module: nn.Module, values: dict[str, Any], prefix: str) -> None: ...
    def before_load(self, module: nn.Module) -> None: ...
    def after_load(self, module: nn.Module) -> None: ...


class OuterAttachment(Attachment, Protocol):
    """An attachment that runs a call through another one."""

    inner: Attachment | None


_attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
_forwards: weakref.WeakKeyDictionary[nn.Module, Call] = weakref.WeakKeyDictionary()
_classes: dict[tuple[type[nn.Module], bool, bool], type[nn.Module]] = {}


class Streamed:
    """Mixin that comes first in the method resolution order of a swapped module."""

    _offload_is_unit = False
    _offload_original: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():  # see [Note: nothing of the engine is traced]
            # A leaf inside a compiled unit is transparent; a unit in a larger graph breaks it.
            is_unit = self._offload_is_unit
            return _call_eagerly(self, args, kwargs) if is_unit else call(*args, **kwargs)
        attachment = _attachments.get(self)  # type: ignore[call-overload]
        if attachment is None:  # a deep copy: a plain module
            return call(*args, **kwargs)
        return attachment.run(call, args, kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        attachment = _attachments.get(self)  # type: ignore[call-overload]
        if attachment is not None:
            attachment.fill_state_dict(self, destination, prefix)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        attachment = _attachments.get(self)  # type: ignore[call-overload]
        if attachment is not None:
            attachment.before_load(self)
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        if attachment is not None:
            attachment.after_load(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_plain, (original_class(type(self)),), self.__dict__.copy()  # type: ignore[arg-type]


class InPieces(Streamed):
    """As `Streamed`, for a module whose weight no slot holds; no compiler looks into it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes in pieces, and in a deep copy as torch does."""
        forward = _forwards.get(self)  # type: ignore[call-overload]
        if forward is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return forward(*args, **kwargs)


def attach(module: nn.Module, attachment: Attachment, *, forward: Call | None = None) -> None:
    """Swaps the class of `module` and routes its calls through `attachment`.

    Args:
        module: To attach to.
        attachment: What is around its calls.
        forward: Computes in the place of the module's own `forward`.
    """
    cls, is_unit = type(module), attachment.is_unit or forward is not None
    key = cls, is_unit, forward is not None
    if key not in _classes:
        own = {
            "__module__": cls.__module__,
            "_offload_is_unit": is_unit,
            "_offload_original": cls,
        }
        base = Streamed if forward is None else InPieces
        made_by = _keeping_properties(type(cls)) if is_parametrized(module) else type(cls)
        _classes[key] = made_by(cls.__name__, (base, cls), own)
    if forward is not None:
        _forwards[module] = forward
    _attachments[module] = attachment
    module.__class__ = _classes[key]


def attach_around(module: nn.Module, outer: OuterAttachment) -> None:
    """Routes the calls of `module` through `outer`, and from there as before."""
    outer.inner = _attachments.get(module)
    if outer.inner is None:
        attach(module, outer)
    else:
        _attachments[module] = outer


def detach_around(module: nn.Module) -> None:
    """Undoes `attach_around`, unless all was detached since."""
    outer: Any = _attachments.get(module)
    if outer is None:
        return
    if outer.inner is None:
        detach(module)
    else:
        _attachments[module] = outer.inner


def detach(module: nn.Module) -> None:
    """Gives `module` its own class back."""
    _forwards.pop(module, None)
    if _attachments.pop(module, None) is not None:
        module.__class__ = original_class(type(module))


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a swapped class was made from."""
    return cls._offload_original if issubclass(cls, Streamed) else cls


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call_eagerly(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class _KeepsProperties(type):
    """The class of swapped classes of parametrized modules.

    torch removes a parametrization by deleting a property of `module.__class__`, which is in the
    class below a swapped one, and replaces `parameter.data` before.
    """

    def __delattr__(cls, name: str) -> None:
        raise StoreError(
            f"cannot remove the parametrization of `{name}` from a wrapped module: expected it to "
            "stay as it was at `wrap`, found `remove_parametrizations`; call that before `wrap`, "
            "or after the session is closed"
        )


def _keeping_properties(metaclass: type[type]) -> type[type]:
    """Returns a metaclass derived from `metaclass`, of which most modules' is `type`."""
    if metaclass is type:
        return _KeepsProperties
    return type(metaclass.__name__, (_KeepsProperties, metaclass), {})


def _new_plain(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)
