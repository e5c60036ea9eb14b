"""Buffers of a block that is computed again in backward.

[Note: what is computed again changes nothing twice]
Running statistics, or the vectors of a spectral norm, change in a call. So a block is computed
again from the values that its forward began with, in memory of their own, and leaves the buffers
as they are: its activations are those of forward, and each step changes a buffer once.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

Place = tuple[nn.Module, str]


class FoundBuffers:
    """The buffers of `module` and those inside it, as a forward finds them."""

    def __init__(self, module: nn.Module) -> None:
        self._is_forward = True
        self._found: dict[Place, torch.Tensor] = {
            (each, name): buffer.detach().clone()
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None and _is_array(buffer)
        }

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Runs forward's call in the first, and computes again in each that follows."""
        if self._is_forward:
            self._is_forward = False
            yield
            self._forget_unchanged()
            return
        now = {(module, name): module._buffers.get(name) for module, name in self._found}
        try:
            for (module, name), found in self._found.items():
                module._buffers[name] = found.clone()
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _forget_unchanged(self) -> None:
        for (module, name), found in list(self._found.items()):
            buffer = module._buffers.get(name)
            if buffer is not None and torch.equal(buffer, found):
                del self._found[module, name]


def _is_array(buffer: torch.Tensor) -> bool:
    """Whether it is one array, which calls change in place, and not sparse, nested or unmade."""
    is_made = not isinstance(buffer, nn.UninitializedBuffer)
    return is_made and buffer.layout is torch.strided and not buffer.is_nested
