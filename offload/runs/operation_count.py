"""Counts what the passes of a model compute, on the meta device: without values or memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCount:
    """Operations of one pass of one micro-step."""

    flops: int
    """Of matrix products, convolutions and attention: two for a multiplication and its addition."""
    moved_bytes: int
    """Read and written by all other operations."""
    flops_of: Mapping[str, int]
    """The part of each module, by its name in the model."""


def count_passes(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[PassCount, PassCount]:
    """Returns what forward and backward of a model on the meta device compute.

    Raises:
        Exception: Whatever the model raises: its passes may need values, which nothing here has.
    """
    with _BytesMoved() as moved, FlopCounterMode(display=False) as counter:
        loss = model(inputs, targets)
        forward = _count(counter, moved)
        loss.backward()
        both = _count(counter, moved)
    backward = PassCount(
        flops=both.flops - forward.flops,
        moved_bytes=both.moved_bytes - forward.moved_bytes,
        flops_of={
            name: flops - forward.flops_of.get(name, 0) for name, flops in both.flops_of.items()
        },
    )
    return forward, backward


def _count(counter: FlopCounterMode, moved: "_BytesMoved") -> PassCount:
    of_modules = {
        name.partition(".")[2]: sum(by_operation.values())
        for name, by_operation in counter.get_flop_counts().items()
    }
    return PassCount(
        flops=counter.get_total_flops(),
        moved_bytes=moved.num_bytes,
        flops_of={name: flops for name, flops in of_modules.items() if name},
    )


class _BytesMoved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operands and results of operations that are no product and no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket not in flop_registry:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result
