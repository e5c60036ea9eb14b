"""The CPU: a unified device, whose arenas are host arenas."""

from collections.abc import Callable
from typing import ClassVar

import psutil
import torch

from offload.devices.base import Copy, Device, MemoryFacts
from offload.memory import Arena, Region, memory_of, storage_over


class CpuDevice(Device):
    """Computes in host memory. The engine copies nothing; copies are there all the same."""

    kind: ClassVar[str] = "cpu"
    is_unified: ClassVar[bool] = True

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def allocate(self, num_bytes: int) -> Region:
        arena = Arena(num_bytes)
        arena.open()
        return arena.take(num_bytes)

    def tensor_over(
        self, region: Region, *, on_death: Callable[[], None] | None = None
    ) -> torch.Tensor:
        assert isinstance(region, memoryview)
        return storage_over(region, on_death=on_death)

    def copy_in(self, source: memoryview, into: torch.Tensor) -> Copy:
        memory_of(into)[:] = source
        return _Done()

    def copy_out(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        into.copy_(source)
        return _Done()

    def memory_facts(self) -> MemoryFacts:
        memory = psutil.virtual_memory()
        return MemoryFacts(total_bytes=memory.total, free_bytes=memory.available)


class _Done:
    """A copy that was made at once."""

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def done(self) -> bool:
        return True
