"""Buffers of a block that is computed again in backward.

[Note: what is computed again changes nothing twice]
Running statistics, or the vectors of a spectral norm, change in a call. So a block is computed
again from the values that its forward began with, in memory of their own, and leaves the buffers
as they are: its activations are those of forward, and each step changes a buffer once. Buffers that
share memory share that of the copies.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Place = tuple[nn.Module, str]


SMALL_BYTES = 1 << 16
"""A buffer of no more is kept without a look at whether the call changed it: on a device each look
waits for all that was computed before, and batch norms count no version."""


class FoundBuffers:
    """The buffers of `module` and those inside it, as a forward finds them."""

    def __init__(self, module: nn.Module) -> None:
        self._is_forward = True
        self._found = _copies(
            {
                (each, name): buffer.detach()
                for each in module.modules()
                for name, buffer in each._buffers.items()
                if buffer is not None and _is_array(buffer)
            }
        )

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
            for (module, name), copy in _copies(self._found).items():
                module._buffers[name] = copy
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _forget_unchanged(self) -> None:
        """Drops copies of large buffers, such as masks, that the call left as they were."""
        for (module, name), found in list(self._found.items()):
            if found.untyped_storage().nbytes() <= SMALL_BYTES:
                continue
            buffer = module._buffers.get(name)
            if buffer is not None and torch.equal(buffer, found):
                del self._found[module, name]


def _copies(buffers: dict[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """Returns copies of which those share memory that did."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[Place, torch.Tensor] = {}
    for place, buffer in buffers.items():
        if type(buffer) is not torch.Tensor or buffer.is_conj() or buffer.is_neg():
            copies[place] = buffer.clone()  # which bytes alone would not tell
            continue
        storage: Any = buffer.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        empty = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        copies[place] = empty.set_(
            storages[storage._cdata], int(buffer.storage_offset()), buffer.shape, buffer.stride()
        )
    return copies


def _is_array(buffer: torch.Tensor) -> bool:
    """Whether it is one array, which calls change in place, and not sparse, nested or unmade."""
    is_made = not isinstance(buffer, nn.UninitializedBuffer)
    return is_made and buffer.layout is torch.strided and not buffer.is_nested
