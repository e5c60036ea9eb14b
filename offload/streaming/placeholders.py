"""What absent parameters point to, and how a write to one is found.

[Note: a write to an absent parameter shows]
An absent parameter has the shape and the dtype of a present one over one element of memory: what is
written to it is lost. A write to the parameter or to a view of it moves its version counter. One
through `parameter.data` moves none, and is found in the element. That is a signalling NaN with a
sign: other NaNs have other bits, and what is computed from it has too. Integers and booleans have
no such value, and of one element there are operations that leave a NaN its bits, such as `clamp_`:
those elements are in pages of which the kernel tells whether they were written to. Where it does
not, as in the memory of a GPU, a write of the very bits is not told from none.
"""

from collections.abc import Mapping

import torch

from offload.memory import WatchedPage, memory_of, try_watch

_SIGNALLING = {
    torch.float64: 0xFFF5A5A5A5A5A5A5,
    torch.float32: 0xFFA5A5A5,
    torch.bfloat16: 0xFFA5,
    torch.float16: 0xFD5A,
}
"""Source: IEEE 754-2008, 6.2.1: the first bit of the fraction of a signalling NaN is 0."""
_OTHER_BYTE = 0xA5


class Placeholder:
    """A placeholder, and whether it is as it was made.

    Attributes:
        tensor: Of the parameter's shape and dtype over one element.
        address: Of the element.
    """

    __slots__ = ("_bits", "_memory", "_page", "address", "tensor")

    def __init__(self, parameter: torch.Tensor, *, device: torch.device | None = None) -> None:
        where = parameter.device if device is None else device
        is_read_here = where.type == "cpu" and parameter.numel() > 0
        self._bits = _bits_of(parameter.dtype)
        self._page: WatchedPage | None = None
        if is_read_here and (parameter.dtype not in _SIGNALLING or parameter.numel() == 1):
            self._page = try_watch(self._bits)
        if self._page is None:
            self.tensor = placeholder_of(parameter, device=device)
        else:
            bits = torch.frombuffer(self._page.memory, dtype=torch.uint8, count=len(self._bits))
            self.tensor = _shaped(bits, parameter)
        self.address = self.tensor.data_ptr()
        self._memory = memory_of(self.element) if is_read_here else None

    @property
    def element(self) -> torch.Tensor:
        """The one element, as bytes."""
        return self.tensor.as_strided((1,), (1,)).view(torch.uint8)

    @property
    def is_written(self) -> bool | None:
        """Whether the element was written to; None where only its device can tell."""
        if self._memory is None:
            return None
        return self._memory != self._bits or (self._page is not None and self._page.was_written)


def placeholder_of(parameter: torch.Tensor, *, device: torch.device | None = None) -> torch.Tensor:
    """Returns a tensor of the parameter's shape and dtype over one element, NaN if it can be."""
    where = parameter.device if device is None else device
    bits = torch.tensor(list(_bits_of(parameter.dtype)), dtype=torch.uint8, device=where)
    return _shaped(bits, parameter)


def _shaped(bits: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    single = bits.view(parameter.dtype)
    return single.expand(parameter.shape) if parameter.dim() else single.view(())


def find_written(placeholders: Mapping[str, Placeholder]) -> list[str]:
    """Returns the names of placeholders that are not what they were made any more.

    Reading waits for all that was asked of their device, so it is done once for each dtype.
    """
    written: list[str] = []
    of_dtype: dict[torch.dtype, list[str]] = {}
    for name, each in placeholders.items():
        is_written = each.is_written
        if is_written:
            written.append(name)
        elif is_written is None and each.tensor.numel():
            of_dtype.setdefault(each.tensor.dtype, []).append(name)
    for dtype, names in of_dtype.items():
        found = torch.stack([placeholders[name].element for name in names]).tolist()
        bits = list(_bits_of(dtype))
        written += [name for name, one in zip(names, found, strict=True) if one != bits]
    return written


def _bits_of(dtype: torch.dtype) -> bytes:
    if dtype is torch.bool:
        return b"\1"
    if dtype in _SIGNALLING:
        return _SIGNALLING[dtype].to_bytes(dtype.itemsize, "little")
    return bytes([_OTHER_BYTE] * dtype.itemsize)
