"""Torch storages over arena memory that tell when they die.

[Note: a slot belongs to a storage object]
A slot is reused only when no tensor can reach it any more. Each time bytes become visible to
torch they are wrapped in a *new* storage; every view, alias or saved tensor keeps that storage
alive, whoever made it. When the storage dies, `on_death` runs and the slot may be leased again.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def storage_over(memory: memoryview, *, on_death: Callable[[], None] | None = None) -> torch.Tensor:
    """Returns a uint8 tensor `(len(memory),)` over `memory`, in a storage of its own.

    Ownership: The tensor keeps the memory's mapping alive. `on_death` is called once, in the
        thread that drops the last tensor of this storage.
    """
    if len(memory) == 0:
        if on_death is not None:
            on_death()
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    owner = np.frombuffer(memory, dtype=np.uint8)
    if on_death is not None:
        finalizer = weakref.finalize(owner, on_death)
        finalizer.atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous 1-D CPU tensor, without a copy."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def address_of(memory: memoryview) -> int:
    """Returns where bytes in host memory begin."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def view_as(
    base: torch.Tensor, *, offset_bytes: int, num_elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the 1-D view `(num_elements,)` of `dtype` at `offset_bytes` of a uint8 tensor."""
    num_bytes = num_elements * dtype.itemsize
    return base[offset_bytes : offset_bytes + num_bytes].view(dtype)
