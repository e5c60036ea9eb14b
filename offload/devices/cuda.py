"""CUDA devices: everything that is only for CUDA is in this file.

Nothing here has run in this project's own tests without a GPU, except what takes a registrar:
`scripts/gpu_check.sh` runs the rest.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from offload.devices.base import Copy, Device, MemoryFacts
from offload.errors import BudgetError, ConfigError
from offload.memory import Region
from offload.sizes import GIB, format_size

_cuda: Any = torch.cuda  # much of it has no annotations

PIECE_BYTES = 64 * GIB
"""Host memory is registered in pieces of at most this: larger single registrations have been seen
to fail where the same bytes in pieces do not."""


class Registrar(Protocol):
    """Locks host memory for a device."""

    def register(self, address: int, num_bytes: int) -> None:
        """Locks a piece; raises OSError where it can't."""
        ...

    def unregister(self, address: int) -> None:
        """Unlocks the piece that begins at `address`."""
        ...


class CudaRegistrar:
    """Registers through the CUDA runtime."""

    def register(self, address: int, num_bytes: int) -> None:
        runtime = _cuda.cudart()
        code = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if code != 0:
            raise OSError(f"cudaHostRegister gave error {code}")

    def unregister(self, address: int) -> None:
        runtime = _cuda.cudart()
        runtime.cudaHostUnregister(address)


class HostRegistration:
    """Which host memory is registered, in which pieces."""

    def __init__(self, registrar: Registrar, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._registrar = registrar
        self._piece_bytes = piece_bytes
        self._pieces: dict[int, list[tuple[int, int]]] = {}

    @property
    def registered_bytes(self) -> int:
        return sum(size for pieces in self._pieces.values() for _, size in pieces)

    def register(self, address: int, num_bytes: int) -> None:
        """Registers memory piece by piece, or nothing of it.

        Raises:
            BudgetError: A piece could not be registered; those before it are not any more.
        """
        pieces: list[tuple[int, int]] = []
        for start in range(0, num_bytes, self._piece_bytes):
            size = min(self._piece_bytes, num_bytes - start)
            try:
                self._registrar.register(address + start, size)
            except OSError as error:
                for done, _ in reversed(pieces):
                    self._registrar.unregister(done)
                raise BudgetError(
                    f"cannot register {format_size(num_bytes)} of host memory with CUDA: piece "
                    f"{len(pieces) + 1} of {-(-num_bytes // self._piece_bytes)} "
                    f"({format_size(size)}): {error}; nothing stays registered; lower "
                    "`tiers.host.memory` or raise the limit of locked memory"
                ) from error
            pieces.append((address + start, size))
        self._pieces[address] = pieces

    def unregister(self, address: int) -> None:
        """Ends what `register` did; nothing if it did nothing."""
        for piece, _ in reversed(self._pieces.pop(address, [])):
            self._registrar.unregister(piece)

    def unregister_all(self) -> None:
        for address in list(self._pieces):
            self.unregister(address)

    def cut(self, address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (offset, bytes) of the parts of a range that lie in one piece each.

        One transfer must not cross from one registration into the next.
        """
        stop = address + num_bytes
        borders = sorted(
            start for pieces in self._pieces.values() for start, _ in pieces
            if address < start < stop
        )  # fmt: skip
        for begin, end in zip([address, *borders], [*borders, stop], strict=True):
            yield begin - address, end - begin


class CudaDevice(Device):
    """One CUDA device, with a stream for copies each way."""

    kind: ClassVar[str] = "cuda"
    computes_at_once: ClassVar[bool] = False

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "cannot compute on device `cuda`: expected a CUDA device, found none that this "
                f"torch ({torch.__version__}) can use; choose `cpu`, or install torch for CUDA"
            )
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._registration = HostRegistration(CudaRegistrar())
        self._in: Any = None
        self._out: Any = None
        # By the address of what is to be filled: recorded after the last use of its former bytes.
        self._last_uses: dict[int, Any] = {}
        self._lock = threading.RLock()  # a dying storage comes from inside any allocation

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def open(self) -> None:
        if self._in is None:
            self._in = _cuda.Stream(self._device)
            self._out = _cuda.Stream(self._device)

    def close(self) -> None:
        if self._in is not None:
            _cuda.synchronize(self._device)
        self._in = self._out = None
        self._registration.unregister_all()
        self._last_uses.clear()

    def allocate(self, num_bytes: int) -> Region:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            facts = self.memory_facts()
            raise BudgetError(
                f"cannot allocate {format_size(num_bytes)} on device `{self._device}`: "
                f"{format_size(facts.free_bytes)} of {format_size(facts.total_bytes)} free; lower "
                "`tiers.device.memory`"
            ) from error

    def tensor_over(
        self, region: Region, *, on_death: Callable[[], None] | None = None
    ) -> torch.Tensor:
        assert isinstance(region, torch.Tensor)
        if not len(region):
            if on_death is not None:
                on_death()
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        owner = _Owner(region)
        address, compute = region.data_ptr(), _cuda.current_stream(self._device)

        def die() -> None:
            # Backward runs on the stream of its forward, whichever thread drops the storage.
            event = _cuda.Event()
            event.record(compute)
            with self._lock:
                self._last_uses[address] = event
            if on_death is not None:
                on_death()

        weakref.finalize(owner, die).atexit = False
        return torch.as_tensor(owner, device=self._device)

    def empty(self, num_bytes: int) -> torch.Tensor:
        base = super().empty(num_bytes)
        if num_bytes:
            # torch may give memory that work before now on this stream still uses.
            event = _cuda.Event()
            event.record(_cuda.current_stream(self._device))
            with self._lock:
                self._last_uses[base.data_ptr()] = event
            base.record_stream(self._in)
        return base

    def register_host(self, memory: memoryview) -> None:
        if len(memory):
            self._registration.register(_address(memory), len(memory))

    def unregister_host(self, memory: memoryview) -> None:
        if len(memory):
            self._registration.unregister(_address(memory))

    def copy_in(self, source: memoryview, into: torch.Tensor) -> Copy:
        assert self._in is not None, "the device is open"
        self.copied_in_bytes += len(source)
        with self._lock:
            last_use = self._last_uses.pop(into.untyped_storage().data_ptr(), None)
        with _cuda.stream(self._in), torch.no_grad():
            if last_use is not None:
                self._in.wait_event(last_use)
            host = torch.frombuffer(source, dtype=torch.uint8) if len(source) else None
            if host is not None:
                for start, size in self._registration.cut(host.data_ptr(), len(source)):
                    part = slice(start, start + size)
                    into[part].copy_(host[part], non_blocking=True)
            return _CudaCopy(self._in, self._device, keep=host)

    def note_uses(self, tensors: Iterable[torch.Tensor]) -> None:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self._device))
        with self._lock:
            for tensor in tensors:
                if tensor.numel():
                    self._last_uses[tensor.untyped_storage().data_ptr()] = event

    def copy_out(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        assert self._out is not None, "the device is open"
        self.copied_out_bytes += into.numel() * into.element_size()
        self._out.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(self._out), torch.no_grad():
            if not (source.is_contiguous() and into.is_contiguous()):
                into.copy_(source)
            else:
                flat, host = source.reshape(-1), into.view(-1)
                itemsize = host.element_size()
                num_bytes = host.numel() * itemsize
                for start, size in self._registration.cut(host.data_ptr(), num_bytes):
                    part = slice(start // itemsize, (start + size) // itemsize)
                    host[part].copy_(flat[part], non_blocking=True)
            source.record_stream(self._out)
            return _CudaCopy(self._out, self._device, keep=into)

    def memory_facts(self) -> MemoryFacts:
        free, total = _cuda.mem_get_info(self._device)
        return MemoryFacts(total_bytes=total, free_bytes=free)


class _CudaCopy:
    """A copy on a stream, with the event that is recorded after it."""

    def __init__(self, stream: Any, device: torch.device, *, keep: torch.Tensor | None) -> None:
        self._device = device
        self._event = _cuda.Event()
        self._event.record(stream)
        self._keep = keep

    def wait(self) -> None:
        _cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()
        self._keep = None

    def done(self) -> bool:
        return bool(self._event.query())


class _Owner:
    """Device memory in the form from which torch makes a storage; it lives as long as that."""

    def __init__(self, region: torch.Tensor) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.numel(),),
            "typestr": "|u1",
            "data": (region.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
