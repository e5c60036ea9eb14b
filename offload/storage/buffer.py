"""Host memory of transfers: its address and length, whatever object owns it."""

import ctypes
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from offload.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer as BufferProtocol

Buffer: TypeAlias = "BufferProtocol | np.ndarray[Any, Any] | torch.Tensor"
"""Anything with the buffer protocol, or a torch tensor on the CPU; contiguous, of any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferView:
    """The bytes of a buffer.

    Ownership: `owner` keeps the memory at its address for as long as the view lives.
    """

    address: int
    num_bytes: int
    owner: Any

    def memory(self) -> memoryview:
        """Returns the bytes, writable; only to be written where the buffer allows it."""
        if not self.num_bytes:
            return memoryview(b"")
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.address)).cast("B")


def view_buffer(buffer: Buffer, *, writable: bool) -> BufferView:
    """Returns the bytes of `buffer` without copying them.

    Raises:
        ConfigError: It is not contiguous, not on the CPU, or read-only where `writable` is asked.
        TypeError: It has no buffer protocol and is no tensor.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _view_tensor(buffer)
    return _view_protocol(memoryview(buffer), writable=writable)  # type: ignore[arg-type]


def _view_tensor(tensor: "torch.Tensor") -> BufferView:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"cannot transfer a tensor of shape {tuple(tensor.shape)}: expected a contiguous one "
            f"on `cpu`, found strides {tensor.stride()} on `{tensor.device}`; copy it to host "
            "memory first"
        )
    return BufferView(
        address=tensor.data_ptr(), num_bytes=tensor.numel() * tensor.element_size(), owner=tensor
    )


def _view_protocol(memory: memoryview, *, writable: bool) -> BufferView:
    if not memory.c_contiguous:
        raise ConfigError(
            f"cannot transfer a buffer of {memory.nbytes} bytes: expected contiguous memory, "
            f"found strides {memory.strides}; copy it first"
        )
    if writable and memory.readonly:
        raise ConfigError(
            f"cannot read into a buffer of {memory.nbytes} bytes: expected writable memory, found "
            "a read-only one; pass a `bytearray` or an array"
        )
    if not memory.nbytes:
        return BufferView(address=0, num_bytes=0, owner=memory)
    # The array holds the buffer, so the owner can neither resize nor free it.
    array = np.frombuffer(memory, dtype=np.uint8)
    return BufferView(address=array.ctypes.data, num_bytes=memory.nbytes, owner=array)
