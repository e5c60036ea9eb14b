"""The 2-norm of streamed gradients, exact and independent of how they are cut.

`torch.nn.utils.clip_grad_norm_` takes the norm of each gradient, stacks them and takes the norm
of the stack. A `GradientNorm` carries the float64 sums of squares through these two steps, so
that the total is formed in the fixed order: per parameter in blocks, parameters in code-point
order of their names, one square root in float64, one rounding to fp32.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class GradientNorm(torch.Tensor):
    """The norm of one gradient `()`, or of several `(n,)`, fp32, with their sums of squares."""

    sums: dict[str, float]
    value: torch.Tensor

    @staticmethod
    def __new__(
        cls: type["GradientNorm"], sums: dict[str, float], value: torch.Tensor
    ) -> "GradientNorm":
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=value.device
        )

    def __init__(self, sums: dict[str, float], value: torch.Tensor) -> None:
        self.sums = sums
        self.value = value

    @classmethod
    def of(cls, sums: dict[str, float]) -> "GradientNorm":
        """Returns the norm of the one gradient whose sum of squares is given."""
        return cls(sums, total_norm(sums))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def numpy(self, *, force: bool = False) -> Any:
        return self.value.numpy(force=force)

    def tolist(self) -> Any:
        return self.value.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.stack.default and all(isinstance(n, cls) for n in args[0]):
            return _stack(args[0])
        if func is aten.linalg_vector_norm.default and _is_plain_two_norm(args, kwargs):
            return total_norm(args[0].sums)
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]  # to a device: the sums stay where they are
        plain = tree_map(lambda v: v.value if isinstance(v, cls) else v, (args, kwargs))
        return func(*plain[0], **plain[1])


def total_norm(sums: Mapping[str, float]) -> torch.Tensor:
    """Returns n: the fp32 square root of the sums, added in code-point order of names."""
    total = 0.0
    for name in sorted(sums):
        total += sums[name]
    root = math.sqrt(total) if total == total else math.nan
    return torch.tensor(root, dtype=torch.float64).to(torch.float32)


def _stack(norms: Sequence[GradientNorm]) -> GradientNorm:
    sums: dict[str, float] = {}
    for norm in norms:
        sums.update(norm.sums)
    return GradientNorm(sums, torch.stack([norm.value for norm in norms]))


def _is_plain_two_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return order == 2 and len(args) <= 2 and not any(v for k, v in kwargs.items() if k != "ord")
