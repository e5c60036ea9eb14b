"""The arrays of a measured pass, cut from one arena with huge pages."""

from collections.abc import Iterable

import psutil
import torch
from torch import Tensor

from offload.bench.optim_options import OptimCase
from offload.errors import PlanError
from offload.layout import DTYPES, section_kinds
from offload.memory import Arena, storage_over, usable_memory
from offload.optim.kernels import Operands
from offload.sizes import format_size, round_up

_TORCH_BYTES = 24
"""For each parameter that torch updates: master, two moments, an old and a new gradient in fp32;
parameter and gradient in bf16."""
_PAGE_BYTES = 4096


class OptimMemory:
    """Operands of `num_parameters` elements, and two arrays of the size of a state to copy.

    Each array begins a page further from a multiple of the huge page than the one before: arrays
    that all begin alike would compete for the same sets of the caches.
    """

    def __init__(self, case: OptimCase, *, num_parameters: int) -> None:
        self._case = case
        self._num_parameters = num_parameters
        self._kinds = section_kinds(case.codec, case.parameter_dtype, case.optimizer)

    def open(self) -> None:
        """Takes the memory and fills it with ordinary values."""
        case, kinds = self._case, self._kinds
        arena = Arena(self.num_bytes)
        arena.open()
        arrays = [
            self._array(arena.take(self._padded(dtype)), dtype, index)
            for index, dtype in enumerate(self._dtypes)
        ]
        self.source, self.target = arrays[-2:]
        sections = dict(zip((kind.name for kind in kinds), arrays[2:], strict=False))
        arrays[0].fill_(0.01)
        arrays[1].fill_(0.5)
        for values in arrays[2:]:
            values.fill_(1 if values.dtype == torch.int16 else 1e-3)
        self.operands = Operands(
            rule=case.optimizer,
            parameter=arrays[0],
            gradient=arrays[1],
            master_low=sections.pop("master_low", None),
            master=sections.pop("master", None),
            state=sections,
        )

    @property
    def num_bytes(self) -> int:
        """What `open` takes."""
        return sum(self._padded(dtype) for dtype in self._dtypes)

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes that one pass reads and writes per parameter; a master spares the old one."""
        case = self._case
        parameter = DTYPES[case.parameter_dtype].itemsize
        is_read = not any(kind.name == "master" for kind in self._kinds)
        return (
            parameter * (2 if is_read else 1)
            + DTYPES[case.gradient_dtype].itemsize
            + 2 * sum(kind.itemsize for kind in self._kinds)
        )

    @property
    def _dtypes(self) -> list[str]:
        own = [self._case.parameter_dtype, self._case.gradient_dtype]
        return [*own, *(kind.dtype for kind in self._kinds), "float32", "float32"]

    def _padded(self, dtype: str) -> int:
        return round_up(self._num_parameters * DTYPES[dtype].itemsize, _PAGE_BYTES) + _PAGE_BYTES

    def _array(self, memory: memoryview, dtype: str, index: int) -> Tensor:
        num_bytes = self._num_parameters * DTYPES[dtype].itemsize
        start = _PAGE_BYTES if index % 2 else 0
        return storage_over(memory[start : start + num_bytes]).view(getattr(torch, dtype))


def require_room(
    cases: Iterable[OptimCase], *, beside_torch: OptimCase, num_parameters: int
) -> None:
    """Refuses what the kernel would end the process for.

    Args:
        cases: What is measured, one after the other.
        beside_torch: What is measured in turns with torch.
        num_parameters: Of each.

    Raises:
        PlanError: This machine has less memory free.
    """
    needed_bytes = max(
        OptimMemory(beside_torch, num_parameters=num_parameters).num_bytes
        + _TORCH_BYTES * num_parameters,
        *(OptimMemory(case, num_parameters=num_parameters).num_bytes for case in cases),
    )
    available = min(psutil.virtual_memory().available, usable_memory().num_bytes)
    if needed_bytes > available:
        raise PlanError(
            f"cannot measure passes over {num_parameters} parameters: expected at least "
            f"{format_size(needed_bytes)} of memory, found {format_size(available)} available; "
            "lower `--parameters`"
        )
