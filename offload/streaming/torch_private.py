"""The private names of torch that streaming needs, each checked once, in this one file.

Each has been tried on torch 2.9 to 2.13. Where a name is missing the import of this module fails
with a clear refusal: guessing would give wrong gradients in silence.
"""

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.graph import Node

from offload.errors import ConfigError

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


def _require(path: str) -> Any:
    value: Any = torch
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
        if value is None:
            raise ConfigError(
                f"cannot stream parameters with torch {torch.__version__}: expected `{path}`, "
                "found nothing of that name; install a torch between 2.9 and 2.13"
            )
    return value


_graph_task_id = _require("torch._C._current_graph_task_id")
_top_hooks = _require("torch._C._autograd._top_saved_tensors_default_hooks")
_push_hooks = _require("torch._C._autograd._push_saved_tensors_default_hooks")
_pop_hooks = _require("torch._C._autograd._pop_saved_tensors_default_hooks")
_fake_tensors = _require("torch._subclasses.FakeTensorMode")
_will_execute = _require("torch._C._will_engine_execute_node")
_neg_view = _require("torch._neg_view")
_use_count = _require("torch.Tensor._use_count")
_next_number = _require("torch.autograd._get_sequence_nr")
_innermost_transform = _require("torch._C._functorch.peek_interpreter_stack")
_is_tracing = _require("torch._C._is_tracing")
_dispatch_mode = _require("torch._C._get_dispatch_mode")
_FAKE = _require("torch._C._TorchDispatchModeKey.FAKE")
_PROXY = _require("torch._C._TorchDispatchModeKey.PROXY")
_is_wrapped = _require("torch._C._functorch.is_functorch_wrapped_tensor")
_no_transforms = _require("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")

_NOTHING = contextlib.nullcontext()


def tensors_without_memory() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which tensors have shapes and no values, and kernels only tell shapes.

    Unlike on device `meta`, those kernels are the ones of the CPU, and so is what they save.
    """
    mode: contextlib.AbstractContextManager[object] = _fake_tensors()
    return mode


def is_in_backward() -> bool:
    """Returns whether this thread is inside a backward pass."""
    return bool(_graph_task_id() != -1)


def is_transformed() -> bool:
    """Returns whether this thread is inside a transform of `torch.func`, such as `vmap`."""
    return _innermost_transform() is not None


def is_traced() -> bool:
    """Returns whether operations of this thread make a graph or a shape, and no values."""
    if _is_tracing():
        return True
    return _dispatch_mode(_FAKE) is not None or _dispatch_mode(_PROXY) is not None


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which operations are those of no transform of `torch.func`."""
    if not is_transformed():
        return _NOTHING
    context: contextlib.AbstractContextManager[object] = _no_transforms()
    return context


def top_saved_tensor_hooks() -> tuple[PackHook, UnpackHook] | None:
    """Returns the hooks that torch would call now: only the top pair is ever called."""
    hooks: tuple[PackHook, UnpackHook] | None = _top_hooks(False)
    return hooks


def push_saved_tensor_hooks(pack: PackHook, unpack: UnpackHook) -> None:
    """Makes this pair the top one of this thread."""
    _push_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Removes the top pair of this thread."""
    _pop_hooks()


def next_node_number() -> int:
    """Returns a number above those of the graph nodes that this thread has made; its own count."""
    return int(_next_number())


def number_of_node(node: Node) -> int:
    """Returns the number of a graph node in the count of the thread that made it."""
    return int(cast(Any, node)._sequence_nr())


def will_run_in_backward(node: Node) -> bool:
    """Tells whether the current graph task will run `node`.

    Raises:
        RuntimeError: It is what `autograd.grad` asks for.
    """
    return bool(_will_execute(node))


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` has one memory that it is laid over, as a sparse one has not.

    Nor has a wrapper of a transform, or a tangent of zeros.
    """
    is_strided = tensor.layout is torch.strided
    return is_strided and not (_is_wrapped(tensor) or tensor._is_zerotensor())


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view that shows what `tensor` has, negated."""
    view: torch.Tensor = _neg_view(tensor)
    return view


def num_references(tensor: torch.Tensor) -> int:
    """Returns how often torch itself refers to `tensor`: graphs that saved it, and views of it."""
    return int(_use_count(tensor))
