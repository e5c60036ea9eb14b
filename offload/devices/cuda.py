"""CUDA devices: everything that is only for CUDA is in this file.

Without a GPU the project's own tests run this over a runtime that does at once what it is asked and
notes what orders it; `scripts/gpu_check.sh` runs it on a GPU.

[Note: what orders copies on CUDA]
Copies in are in one stream, copies out in another, and models compute in those of their threads. A
copy in waits for events of every stream in which the former bytes were in use: that of the thread
which made the storage, those that waited for its copy, and that of the thread which dropped it. A
copy out waits for the stream of the thread that asks for it. What is in a slot may be used in the
stream that waited for its copy, and in those that wait for that one.
"""

import bisect
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol

import torch

from offload.devices.base import Copy, Device, MemoryFacts
from offload.errors import BudgetError, ConfigError
from offload.memory import Region, address_of
from offload.sizes import GIB, format_size

logger = logging.getLogger("offload.devices")

_cuda: Any = torch.cuda  # much of it has no annotations

_PORTABLE = 1
"""Locked for every context, whichever device is current. Source: driver_types.h."""
PIECE_BYTES = 64 * GIB
"""Host memory is registered in pieces of at most this: larger single registrations have been seen
to fail where the same bytes in pieces do not."""


class Registrar(Protocol):
    """Locks host memory for a device."""

    def register(self, address: int, num_bytes: int) -> None:
        """Locks a piece; raises OSError where it can't."""
        ...

    def unregister(self, address: int) -> None:
        """Unlocks the piece that begins at `address`; raises OSError where it can't."""
        ...


class CudaRegistrar:
    """Registers through the CUDA runtime."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> None:
        with _cuda.device(self._device):
            code = int(_cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
            self._require_success("cudaHostRegister", code)

    def unregister(self, address: int) -> None:
        with _cuda.device(self._device):
            code = int(_cuda.cudart().cudaHostUnregister(address))
            self._require_success("cudaHostUnregister", code)

    def _require_success(self, call: str, code: int) -> None:
        if code == 0:
            return
        # The runtime keeps the error for the next kernel of this thread, which torch takes for one
        # of that kernel's. So here is one. Source: pytorch/pytorch issue 167414.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        raise OSError(f"{call} gave error {code}")


class HostRegistration:
    """Which host memory is registered, in which pieces.

    Concurrency: Any thread.
    """

    def __init__(self, registrar: Registrar, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._registrar = registrar
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        # Where pieces begin, ascending; replaced whole, so that copies read it without the lock.
        self._borders: tuple[int, ...] = ()

    @property
    def registered_bytes(self) -> int:
        with self._lock:
            return sum(size for pieces in self._pieces.values() for _, size in pieces)

    def register(self, address: int, num_bytes: int) -> None:
        """Registers memory piece by piece, or nothing of it.

        Raises:
            BudgetError: A piece could not be registered; those before it are not any more.
        """
        pieces: list[tuple[int, int]] = []
        with self._lock:
            for start in range(0, num_bytes, self._piece_bytes):
                size = min(self._piece_bytes, num_bytes - start)
                try:
                    self._registrar.register(address + start, size)
                except OSError as error:
                    self._unlock(pieces)
                    raise BudgetError(
                        f"cannot register {format_size(num_bytes)} of host memory with CUDA: piece "
                        f"{len(pieces) + 1} of {-(-num_bytes // self._piece_bytes)} "
                        f"({format_size(size)}): {error}; nothing stays registered; lower "
                        "`tiers.host.memory` or raise the limit of locked memory"
                    ) from error
                pieces.append((address + start, size))
            self._pieces[address] = pieces
            self._note_borders()

    def unregister(self, address: int) -> None:
        """Ends what `register` did; nothing if it did nothing."""
        with self._lock:
            self._unlock(self._pieces.pop(address, []))
            self._note_borders()

    def unregister_all(self) -> None:
        for address in list(self._pieces):
            self.unregister(address)

    def _unlock(self, pieces: list[tuple[int, int]]) -> None:
        """Unregisters pieces, all that can be: there is nobody who could do better later."""
        for piece, size in reversed(pieces):
            try:
                self._registrar.unregister(piece)
            except OSError as error:
                logger.warning(
                    "%s of host memory at %#x stay registered with CUDA until the process ends: %s",
                    format_size(size),
                    piece,
                    error,
                )

    def _note_borders(self) -> None:
        starts = (start for pieces in self._pieces.values() for start, _ in pieces)
        self._borders = tuple(sorted(starts))

    def cut(self, address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (offset, bytes) of the parts of a range that lie in one piece each.

        One transfer must not cross from one registration into the next.
        """
        borders, stop = self._borders, address + num_bytes
        inside = borders[bisect.bisect_right(borders, address) : bisect.bisect_left(borders, stop)]
        for begin, end in zip([address, *inside], [*inside, stop], strict=True):
            yield begin - address, end - begin


class CudaDevice(Device):
    """One CUDA device, with a stream for copies each way; see [Note: what orders copies on CUDA].

    What it does to tensors it does in inference mode: there it may change tensors that the caller
    made in that mode and others, which elsewhere it may not.
    """

    kind: ClassVar[str] = "cuda"
    computes_later: ClassVar[bool] = True

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "cannot compute on device `cuda`: expected a CUDA device, found none that this "
                f"torch ({torch.__version__}) can use; choose `cpu`, or install torch for CUDA"
            )
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._registration = HostRegistration(CudaRegistrar(self._device))
        self._in: Any = None
        self._out: Any = None
        # By the address of what is to be filled: events after the last uses of its former bytes,
        # by the stream that they are of.
        self._last_uses: dict[int, dict[Any, Any]] = {}
        # By the address of a storage that is alive: the streams in which it may be in use.
        self._streams: dict[int, set[Any]] = {}
        self._lock = threading.RLock()  # a dying storage comes from inside any allocation

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def registered_bytes(self) -> int:
        return self._registration.registered_bytes

    @property
    def is_captured(self) -> bool:
        return bool(_cuda.is_current_stream_capturing())

    def open(self) -> None:
        if self._in is None:
            self._in = _cuda.Stream(self._device)
            self._out = _cuda.Stream(self._device)

    def close(self) -> None:
        try:
            if self._in is not None:
                _cuda.synchronize(self._device)
        finally:
            self._in = self._out = None
            self._registration.unregister_all()
            self._last_uses.clear()

    def allocate(self, num_bytes: int) -> Region:
        assert self._in is not None, "the device is open"
        try:
            region = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            facts = self.memory_facts()
            raise BudgetError(
                f"cannot allocate {format_size(num_bytes)} on device `{self._device}`: "
                f"{format_size(facts.free_bytes)} of {format_size(facts.total_bytes)} free; lower "
                "`tiers.device.memory`"
            ) from error
        if num_bytes:
            for stream in (self._in, self._out):
                region.record_stream(stream)
            # torch may give memory that work before now on this stream still uses.
            _cuda.current_stream(self._device).synchronize()
        return region

    def tensor_over(
        self, region: Region, *, on_death: Callable[[], None] | None = None
    ) -> torch.Tensor:
        assert isinstance(region, torch.Tensor)
        if not len(region):
            if on_death is not None:
                on_death()
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        owner, address = _Owner(region), region.data_ptr()
        self._streams[address] = {_cuda.current_stream(self._device)}

        def die() -> None:
            # Backward runs in the streams of its forward, whichever thread drops the storage.
            with self._lock:
                streams = self._streams.pop(address, set())
            if self._in is not None:  # else all is over, and nothing is copied any more
                self._note_uses(address, {*streams, _cuda.current_stream(self._device)})
            if on_death is not None:
                on_death()

        weakref.finalize(owner, die).atexit = False
        return torch.as_tensor(owner, device=self._device)

    def empty(self, num_bytes: int) -> torch.Tensor:
        assert self._in is not None, "the device is open"
        base = super().empty(num_bytes)
        if num_bytes:
            # torch may give memory that work before now on this stream still uses.
            self._note_uses(base.data_ptr(), {_cuda.current_stream(self._device)})
            base.record_stream(self._in)
        return base

    def register_host(self, memory: memoryview) -> None:
        if len(memory):
            self._registration.register(address_of(memory), len(memory))

    def unregister_host(self, memory: memoryview) -> None:
        if len(memory):
            for stream in (self._in, self._out):
                if stream is not None:  # copies from and to it may be in flight
                    stream.synchronize()
            self._registration.unregister(address_of(memory))

    def copy_in(self, source: memoryview, into: torch.Tensor) -> Copy:
        assert self._in is not None, "the device is open"
        self.count(in_bytes=len(source))
        address = into.untyped_storage().data_ptr()
        with self._lock:  # until they wait: another part of this memory may be copied meanwhile
            for event in self._last_uses.pop(address, {}).values():
                self._in.wait_event(event)
        with _cuda.stream(self._in), torch.inference_mode():
            host = torch.frombuffer(source, dtype=torch.uint8) if len(source) else None
            if host is not None:
                for start, size in self._registration.cut(host.data_ptr(), len(source)):
                    part = slice(start, start + size)
                    into[part].copy_(host[part], non_blocking=True)
            used = self._streams.get(address)
            return _CudaCopy(self._in, self._device, keep=host, streams=used)

    def note_uses(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = _cuda.current_stream(self._device)
        for tensor in tensors:
            if tensor.numel():
                self._note_uses(tensor.untyped_storage().data_ptr(), {stream})

    def follow(self, stream: Any) -> Any:
        current = _cuda.current_stream(self._device)
        if stream is not None and stream != current:
            current.wait_stream(stream)
        return current

    def copy_out(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        assert self._out is not None, "the device is open"
        self.count(out_bytes=into.numel() * into.element_size())
        self._out.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(self._out), torch.inference_mode():
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

    def _note_uses(self, address: int, streams: Iterable[Any]) -> None:
        """Notes that what is in `streams` up to now uses the bytes at `address`."""
        for stream in streams:
            event = _cuda.Event()
            event.record(stream)
            with self._lock:
                self._last_uses.setdefault(address, {})[stream] = event


class _CudaCopy:
    """A copy on a stream, with the event that is recorded after it."""

    def __init__(
        self,
        stream: Any,
        device: torch.device,
        *,
        keep: torch.Tensor | None,
        streams: set[Any] | None = None,
    ) -> None:
        """Records the event.

        Args:
            stream: Of the copy.
            device: Where it is.
            keep: Host memory that the copy uses.
            streams: Takes the streams that wait for the copy, and then use its bytes.
        """
        self._device = device
        self._event = _cuda.Event()
        self._event.record(stream)
        self._keep = keep
        self._streams = streams

    def wait(self) -> None:
        stream = _cuda.current_stream(self._device)
        stream.wait_event(self._event)
        if self._streams is not None:
            self._streams.add(stream)

    def synchronize(self) -> None:
        self._event.synchronize()
        self._keep = None

    def done(self) -> bool:
        if not self._event.query():
            return False
        self._keep = None
        return True


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
