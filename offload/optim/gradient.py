"""The gradient that `p.grad` shows while its values live in an accumulator.

[Note: what a streamed gradient is]
Its materialisation *is* the accumulator's memory, so that every write, slice, view and second
backward has its plain effect. Multiplying by one number (clipping, unscaling) is not done at
once: the factor stays *pending* and is applied in fp32 inside the fused update, to the unrounded
gradient. Operations that return new tensors read a scaled copy; writes, and operations that
return an alias, apply the pending factors first, rounded to nearest even.

[Note: who has an alias may write to it]
An alias shows the memory in a storage of its own, so it is known as long as a tensor, or an array,
of it is there. Meanwhile its gradient may change without a word: no update of it begins before the
step, and none goes on after the step has returned.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from offload.memory import memory_of
from offload.optim.gradient_home import GradientHome
from offload.optim.norm import GradientNorm

SumsOfSquares = Callable[[Sequence[torch.Tensor], Sequence[float]], list[float]]
"""Float64 sums of squares of 1-D gradients after the factors, in the fixed block order."""


class Arrival(Protocol):
    """A copy into an accumulator in flight."""

    def synchronize(self) -> None: ...


StartCopy = Callable[[torch.Tensor, torch.Tensor], Arrival]
"""Starts copying the first tensor into the second, in host memory."""

MAX_PENDING = 2
"""Factors that the fused pass takes: the inverse loss scale and the clip factor."""

aten = torch.ops.aten

_HOST = torch.device("cpu")


class Accumulator:
    """One parameter's gradient in host memory, with the factors that are still pending.

    Attributes:
        device: Where the parameter is, and the gradient seems to be.
        shape, dtype: Of the gradient.
        scales: Pending factors, each an fp32 value, multiplied one after the other.
    """

    def __init__(
        self,
        name: str,
        home: GradientHome,
        sums_of_squares: SumsOfSquares,
        before_write: Callable[[str], None] = lambda _: None,
        *,
        device: torch.device = _HOST,
    ) -> None:
        """Stores its arguments.

        Args:
            name: The parameter's.
            home: Of the gradient's values.
            sums_of_squares: For norms.
            before_write: Called before the memory changes: an update may still have to read it.
            device: That `p.grad` shows.
        """
        self.name = name
        self.device = device
        self.shape, self.dtype = home.shape, home.dtype
        self.scales: list[float] = []
        self._home = home
        self._arrival: Arrival | None = None
        self._sums_of_squares = sums_of_squares
        self._before_write = before_write
        self._aliases: list[weakref.ref[Any]] = []

    @property
    def memory(self) -> torch.Tensor:
        """The gradient's values, of the parameter's shape, over arena memory; waits for them."""
        self.settle()
        return self._home.write()

    def start(self, gradient: torch.Tensor, *, start_copy: StartCopy | None = None) -> None:
        """Takes the first gradient of a step: copied, nothing pending.

        Args:
            gradient: Its values.
            start_copy: Starts copying them from a device; None: they are copied at once.
        """
        memory = self.begin()
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if start_copy is None or dense.dtype != memory.dtype:
            memory.copy_(dense)
        else:
            self._arrival = start_copy(dense, memory)

    def begin(self) -> torch.Tensor:
        """Returns the memory for the first gradient of a step, which the caller writes whole."""
        self._before_write(self.name)
        self.settle()
        self.scales.clear()
        return self._home.write(replaces=True)

    def settle(self) -> None:
        """Waits for a copy that was started."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None  # after the wait, which an interrupt may end

    def multiply(self, factor: float) -> None:
        """Leaves one more factor pending; a factor of exactly 1 is none."""
        if factor == 1.0:
            return
        if len(self.scales) == MAX_PENDING:
            self.apply_scales()
        self.scales.append(factor)

    def apply_scales(self) -> None:
        """Multiplies the memory by what is pending, rounded once to nearest even."""
        if self.scales:
            self._before_write(self.name)
            scaled = self._scaled()
            self.memory.copy_(scaled)
            self.scales.clear()

    def writable(self) -> torch.Tensor:
        """Returns the memory for writing at once."""
        self._before_write(self.name)
        self.apply_scales()
        return self.memory

    def alias(self) -> torch.Tensor:
        """Returns the memory for who may keep it; see [Note: who has an alias may write to it]."""
        memory = self.writable()
        if not memory.numel():
            return memory
        array = np.frombuffer(memory_of(memory.view(-1)), dtype=np.uint8)
        self._aliases = [each for each in self._aliases if each() is not None]
        self._aliases.append(weakref.ref(array))
        return torch.frombuffer(array, dtype=memory.dtype).view(memory.shape)

    @property
    def is_aliased(self) -> bool:
        """Whether somebody may write to the memory at any time."""
        return any(each() is not None for each in self._aliases)

    def read(self) -> torch.Tensor:
        """Returns the gradient for reading: a scaled copy, or the memory where none pends."""
        return self._scaled().to(self.dtype) if self.scales else self._values()

    def sum_of_squares(self) -> float:
        known = None if self.scales else self._home.known_sum()
        if known is not None:
            return known
        return self._sums_of_squares([self._values().view(-1)], self.scales)[0]

    def is_finite(self) -> bool:
        """Whether every value is, before the factors that are pending."""
        return bool(torch.isfinite(self._values()).all())

    def _values(self) -> torch.Tensor:
        """Returns the memory for reading alone."""
        self.settle()
        return self._home.read()

    def _scaled(self) -> torch.Tensor:
        value = self._values().to(torch.float32)
        for factor in self.scales:
            value = value * factor
        return value


class StreamedGradient(torch.Tensor):
    """What `p.grad` is between backward and update."""

    accumulator: Accumulator

    @staticmethod
    def __new__(cls: type["StreamedGradient"], accumulator: Accumulator) -> "StreamedGradient":
        return torch.Tensor._make_wrapper_subclass(
            cls, accumulator.shape, dtype=accumulator.dtype, device=accumulator.device
        )

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StreamedGradient({self.accumulator.read()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.accumulator.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = self.accumulator.read().clone()
        return copy.__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the gradient's values as an array over the accumulator's memory."""
        return self.accumulator.alias().numpy(force=force)

    def tolist(self) -> Any:
        """Returns the gradient's values as nested lists."""
        return self.accumulator.read().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _run_plainly(func, args, kwargs)


def _run_plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` on the accumulators' memory and hands the streamed gradients back."""
    aliased = _aliased_arguments(func, args, kwargs)
    if any(_is_elsewhere(leaf) for leaf in tree_leaves((args, kwargs))):
        return _run_on_device(func, args, kwargs, aliased)
    handed_out: dict[int, StreamedGradient] = {}

    def materialise(value: Any) -> Any:
        if not isinstance(value, StreamedGradient):
            return value
        if id(value) not in aliased:
            return value.accumulator.read()
        kept = not func._schema.is_mutable
        memory = value.accumulator.alias() if kept else value.accumulator.writable()
        handed_out[id(memory)] = value
        return memory

    plain_args, plain_kwargs = tree_map(materialise, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if not func._schema.returns:
        return None
    return tree_map(lambda value: handed_out.get(id(value), value), result)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, StreamedGradient) and value.device != _HOST


def _run_on_device(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], aliased: set[int]
) -> Any:
    """Runs `func` on copies of the accumulators on the device, and copies back what it wrote.

    An alias that it returns shows the host memory itself, so that writes to it are not lost.
    """
    if not func._schema.is_mutable and aliased:
        host_args, host_kwargs = tree_map(_host_memory, (args, kwargs))
        return func(*host_args, **host_kwargs)
    copies: dict[int, tuple[StreamedGradient, torch.Tensor]] = {}

    def materialise(value: Any) -> Any:
        if not isinstance(value, StreamedGradient):
            return value
        if id(value) not in aliased:
            return value.accumulator.read().to(value.device)
        copy = value.accumulator.writable().to(value.device)
        copies[id(copy)] = value, copy
        return copy

    plain_args, plain_kwargs = tree_map(materialise, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for gradient, copy in copies.values():
        gradient.accumulator.memory.copy_(copy)
    if not func._schema.returns:
        return None
    return tree_map(lambda v: copies[id(v)][0] if id(v) in copies else v, result)


def _host_memory(value: Any) -> Any:
    if not isinstance(value, StreamedGradient):
        return value
    return value.accumulator.alias()


def _aliased_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The ids of tensors that `func` writes to or returns a view of."""
    aliased: set[int] = set()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None:
            continue
        value = kwargs.get(argument.name, args[index] if index < len(args) else None)
        aliased.update(id(leaf) for leaf in tree_leaves(value))
    return aliased


def _same_object(gradient: Any, *_: Any, **__: Any) -> Any:
    return gradient


def _as_factor(value: Any) -> float | None:
    """Returns the one number, rounded to fp32, that `value` multiplies by, or None."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, StreamedGradient) or value.dim() != 0 or value.is_complex():
            return None
        return float(value.to(torch.float32))
    if isinstance(value, (bool, complex)):
        return None
    return float(torch.tensor(value, dtype=torch.float32))


def _multiply(gradient: Any, other: Any) -> Any:
    factor = _as_factor(other)
    if factor is None or not isinstance(gradient, StreamedGradient):
        return NotImplemented
    gradient.accumulator.multiply(factor)
    return gradient


def _multiply_each(gradients: Sequence[Any], other: Any) -> Any:
    factor = _as_factor(other)
    if factor is None or not all(isinstance(g, StreamedGradient) for g in gradients):
        return NotImplemented
    for gradient in gradients:
        gradient.accumulator.multiply(factor)
    return None


def _unscale_each(gradients: Sequence[Any], found_inf: Any, inverse_scale: Any) -> Any:
    if not all(isinstance(g, StreamedGradient) for g in gradients):
        return NotImplemented
    for gradient in gradients:
        gradient.accumulator.apply_scales()
        if not gradient.accumulator.is_finite():
            found_inf.fill_(1.0)
    return _multiply_each(gradients, inverse_scale.reshape(()))


def _add(gradient: Any, other: Any, *, alpha: Any = 1) -> Any:
    """What autograd does with every gradient after the first: the plain way, but shorter."""
    if not isinstance(gradient, StreamedGradient) or isinstance(other, StreamedGradient):
        return NotImplemented
    if gradient.device != _HOST:
        return NotImplemented
    gradient.accumulator.writable().add_(other, alpha=alpha)
    return gradient


def _overwrite(func: Any) -> Callable[..., Any]:
    """An operation that replaces every value: what was pending is dropped, not applied."""

    def run(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(gradient, StreamedGradient):
            return NotImplemented
        if any(leaf is gradient for leaf in tree_leaves((args, kwargs))):
            return NotImplemented
        gradient.accumulator.scales.clear()
        return _run_plainly(func, (gradient, *args), kwargs)

    return run


def _norm(gradient: Any, ord: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    if ord != 2 or dim is not None or args or any(v for v in kwargs.values()):
        return NotImplemented
    return GradientNorm.of({gradient.accumulator.name: gradient.accumulator.sum_of_squares()})


def _norm_each(gradients: Sequence[Any], ord: Any = 2, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    if not all(isinstance(g, StreamedGradient) for g in gradients):
        return NotImplemented
    norms = [_norm(g, ord, None, *args, **kwargs) for g in gradients]
    return NotImplemented if any(n is NotImplemented for n in norms) else norms


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same_object,
    aten.alias.default: _same_object,
    aten.add_.Tensor: _add,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten._foreach_mul_.Scalar: _multiply_each,
    aten._foreach_mul_.Tensor: _multiply_each,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_each,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norm_each,
    aten.zero_.default: _overwrite(aten.zero_.default),
    aten.copy_.default: _overwrite(aten.copy_.default),
}
