"""The arrays of a measured pass, cut from one arena with huge pages."""

import psutil
import torch
from torch import Tensor

from offload.bench.optim_options import OptimCase
from offload.errors import BudgetError
from offload.layout import DTYPES, section_kinds
from offload.memory import Arena, storage_over
from offload.optim.kernels import Operands
from offload.sizes import format_size, round_up

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
        """Takes the memory and fills it with ordinary values.

        Raises:
            BudgetError: This machine has less free.
        """
        case, kinds = self._case, self._kinds
        dtypes = [case.parameter_dtype, case.gradient_dtype, *(k.dtype for k in kinds)]
        dtypes += ["float32", "float32"]
        num_bytes = sum(self._padded(dtype) for dtype in dtypes)
        _require_free(num_bytes)
        arena = Arena(num_bytes)
        arena.open()
        arrays = [
            self._array(arena.take(self._padded(dtype)), dtype, index)
            for index, dtype in enumerate(dtypes)
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

    def _padded(self, dtype: str) -> int:
        return round_up(self._num_parameters * DTYPES[dtype].itemsize, _PAGE_BYTES) + _PAGE_BYTES

    def _array(self, memory: memoryview, dtype: str, index: int) -> Tensor:
        num_bytes = self._num_parameters * DTYPES[dtype].itemsize
        start = _PAGE_BYTES if index % 2 else 0
        return storage_over(memory[start : start + num_bytes]).view(getattr(torch, dtype))


def _require_free(num_bytes: int) -> None:
    """Refuses what the kernel would end the process for."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise BudgetError(
            f"cannot measure in {format_size(num_bytes)} of memory: found "
            f"{format_size(available)} available; lower `--parameters`"
        )
