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

[Note: a swapped class is no class of the program's]
What a program does for each of its classes (`__init_subclass__`, a metaclass that registers them or
wants arguments) is not done for one that is swapped in.
"""

import abc
import operator
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from offload.errors import StoreError
from offload.streaming.parameters import StreamedParameters

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

    def __init_subclass__(cls) -> None:
        """See [Note: a swapped class is no class of the program's]."""

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

    def _load_from_state_dict(
        self, values: Any, prefix: Any, metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        attachment = _attachments.get(self)  # type: ignore[call-overload]
        if attachment is not None:
            _require_copies(self, metadata)  # type: ignore[arg-type]
            attachment.before_load(self)
        super()._load_from_state_dict(  # type: ignore[misc]
            values, prefix, metadata, *args, **kwargs
        )
        if attachment is not None:
            attachment.after_load(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):  # the name of a global
            return reduced
        return _as_plain(self, *reduced)  # type: ignore[arg-type]


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
    cls, is_unit = original_class(type(module)), attachment.is_unit or forward is not None
    key = cls, is_unit, forward is not None
    if key not in _classes:
        own: dict[str, Any] = {
            "__module__": cls.__module__,
            "_offload_is_unit": is_unit,
            "_offload_original": cls,
        }
        if hasattr(cls, "__deepcopy__"):
            own["__deepcopy__"] = _deep_copy_as_plain
        base = Streamed if forward is None else InPieces
        made_by = _keeping_properties(type(cls)) if is_parametrized(module) else type(cls)
        _classes[key] = _new_class(made_by, cls.__name__, (base, cls), own)
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


def is_attached(module: nn.Module) -> bool:
    """Tells whether calls of `module` go through an attachment: those of a copy do not."""
    return module in _attachments


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a swapped class was made from."""
    return cls._offload_original if issubclass(cls, Streamed) else cls


def _require_copies(module: nn.Module, metadata: Any) -> None:
    """Raises StoreError where `load_state_dict` would put other parameters into the module."""
    if metadata.get("assign_to_params_buffers", False):
        raise StoreError(
            f"cannot load a state dict into a wrapped `{type(module).__name__}`: expected values "
            "for the parameters that the session has, found `assign=True`, which puts others in "
            "their place that no optimizer takes and no commit stores; leave `assign` out"
        )


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


def _new_class(
    made_by: type[type], name: str, bases: tuple[type, ...], own: dict[str, Any]
) -> type[nn.Module]:
    """Makes a class as Python does, and not as a metaclass of the program's would."""
    basic = abc.ABCMeta if issubclass(made_by, abc.ABCMeta) else type
    return cast(type[nn.Module], basic.__new__(made_by, name, bases, own))


def _as_plain(
    module: nn.Module,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    state: Any = None,
    *items: Any,
) -> tuple[Any, ...]:
    """Returns how a copy is made of the class that a swapped one was made from.

    Nothing in it is of this package: a pickle can be read where that is not.
    """
    cls, parameters = type(module), module._parameters
    plain = original_class(cls)
    if isinstance(state, dict) and isinstance(parameters, StreamedParameters):
        lists = {k: parameters.list_of(v) for k, v in state.items() if type(v) is list}
        state = {**state, **{name: each for name, each in lists.items() if each is not None}}
    is_new = getattr(make, "__name__", "") == "__newobj__"
    if is_new:  # of `copyreg`: picklers compare its class with the module's
        return operator.methodcaller("__new__", plain, *args[1:]), (plain,), state, *items
    return make, tuple(plain if each is cls else each for each in args), state, *items


def _deep_copy_as_plain(module: Any, memo: dict[int, Any]) -> Any:
    """Copies by what the class of the program has for it."""
    cls: Any = original_class(type(module))
    copied = cls.__deepcopy__(module, memo)
    copied.__class__ = original_class(type(copied))
    return copied
