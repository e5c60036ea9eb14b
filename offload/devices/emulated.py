"""An accelerator without one: CPU tensors in a bounded memory behind an asynchronous link.

It shows the faults of ordering that a GPU would show. Bytes arrive as late as they may: a copy
reads its source only when its time is over. Slots that were given back hold NaN. Computing with a
slot before the wait that makes its copy visible raises.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.devices.base import Copy, Device, MemoryFacts
from offload.errors import BudgetError, OffloadError
from offload.memory import Arena, Region, address_of, memory_of, storage_over
from offload.sizes import format_size

POISON = 0xFF
"""Every byte of a slot that was given back: NaN in all floating-point types."""
_UNBOUNDED_BYTES = 1 << 50


class OrderError(OffloadError, RuntimeError):
    """Device memory was used before the event that makes its bytes valid."""


class EmulatedDevice(Device):
    """A bounded device memory and one link each way, each with a thread that copies."""

    kind: ClassVar[str] = "emulated"

    def __init__(
        self,
        *,
        memory_bytes: int | None = None,
        link_bytes_per_s: float | None = None,
        link_latency_s: float = 0.0,
    ) -> None:
        self._memory_bytes = _UNBOUNDED_BYTES if memory_bytes is None else memory_bytes
        self._allocated_bytes = 0
        self._in = _Link("in", link_bytes_per_s, link_latency_s)
        self._out = _Link("out", link_bytes_per_s, link_latency_s)
        # By the address of a storage whose bytes must not be read: the copies to it that nobody
        # has waited for, none where it holds poison. Written by whichever thread drops a storage.
        self._not_valid: dict[int, set[_LinkCopy]] = {}
        # Addresses of storages that may be in use: their bytes were made visible.
        self._in_use: set[int] = set()
        self._registered: dict[int, int] = {}  # bytes, by address

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def open(self) -> None:
        self._in.open()
        self._out.open()

    def close(self) -> None:
        self._in.close()
        self._out.close()
        self._registered.clear()

    def allocate(self, num_bytes: int) -> Region:
        free = self._memory_bytes - self._allocated_bytes
        if num_bytes > free:
            raise BudgetError(
                f"cannot allocate {format_size(num_bytes)} on device `emulated`: "
                f"{format_size(free)} of {format_size(self._memory_bytes)} free; raise "
                "`tiers.device.memory`"
            )
        self._allocated_bytes += num_bytes
        arena = Arena(num_bytes)
        arena.open()
        region = arena.take(num_bytes)
        _poison(region)
        return region

    def tensor_over(
        self, region: Region, *, on_death: Callable[[], None] | None = None
    ) -> torch.Tensor:
        assert isinstance(region, memoryview)
        address = 0

        def die() -> None:
            _poison(region)
            self._not_valid.pop(address, None)
            self._in_use.discard(address)
            if on_death is not None:
                on_death()

        base = storage_over(region, on_death=die)
        if len(region):
            address = base.data_ptr()
            self._not_valid[address] = set()
        return base

    def empty(self, num_bytes: int) -> torch.Tensor:
        base = super().empty(num_bytes)
        if num_bytes:
            _poison(memory_of(base))
            address = base.data_ptr()
            self._not_valid[address] = set()
            die = weakref.finalize(base.untyped_storage(), self._forget, address)
            die.atexit = False
        return base

    @property
    def registered_bytes(self) -> int:
        return sum(self._registered.values())

    def register_host(self, memory: memoryview) -> None:
        if len(memory):
            self._registered[address_of(memory)] = len(memory)

    def unregister_host(self, memory: memoryview) -> None:
        if len(memory):
            self._registered.pop(address_of(memory), None)

    def copy_in(self, source: memoryview, into: torch.Tensor) -> Copy:
        memory = memory_of(into)
        address = into.untyped_storage().data_ptr()
        if address in self._in_use:
            raise OrderError(
                f"cannot copy to device memory at {address:#x}: expected nothing that still uses "
                "its bytes, found that they were made visible; call `note_uses` after the last use"
            )
        self.count(in_bytes=len(source))

        def move() -> None:
            memory[:] = source

        copy = _LinkCopy(move, len(source), on_visible=lambda: self._became_visible(address, copy))
        if len(source):
            self._not_valid.setdefault(address, set()).add(copy)
        self._in.submit(copy)
        return copy

    def note_uses(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._in_use.discard(tensor.untyped_storage().data_ptr())

    def copy_out(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        self.require_valid(source)
        self.count(out_bytes=into.numel() * into.element_size())

        def move() -> None:
            with torch.no_grad():
                into.copy_(source)

        copy = _LinkCopy(move, into.numel() * into.element_size())
        self._out.submit(copy)
        return copy

    def memory_facts(self) -> MemoryFacts:
        return MemoryFacts(
            total_bytes=self._memory_bytes,
            free_bytes=self._memory_bytes - self._allocated_bytes,
        )

    def require_valid(self, tensor: torch.Tensor) -> None:
        """Raises OrderError unless what `tensor` shows of device memory is valid."""
        if tensor.layout is not torch.strided or not self._not_valid:
            return
        address = tensor.untyped_storage().data_ptr()
        if address in self._not_valid:
            copies = self._not_valid[address]
            found = "its copy, which nobody has waited for" if copies else "no copy to it"
            raise OrderError(
                f"cannot compute with device memory at {address:#x}: expected bytes that a copy "
                f"brought and a wait made visible, found {found}; wait for the copy first"
            )

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Checks the inputs of every operation of this thread: see `require_valid`."""
        with _Checker(self):
            yield

    def _became_visible(self, address: int, copy: "_LinkCopy") -> None:
        copies = self._not_valid.get(address, set())
        if copy in copies:
            copies.discard(copy)
            if not copies:
                del self._not_valid[address]
                self._in_use.add(address)

    def _forget(self, address: int) -> None:
        self._not_valid.pop(address, None)
        self._in_use.discard(address)


class _Checker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what operations read."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            # A view is made of memory that is not there yet; it is read by what takes the view.
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and not func.is_view:
                self._device.require_valid(leaf)
        return func(*args, **(kwargs or {}))


class _LinkCopy:
    """One copy on a link; see `Copy`."""

    def __init__(
        self,
        move: Callable[[], None],
        num_bytes: int,
        *,
        on_visible: Callable[[], None] | None = None,
    ) -> None:
        self.num_bytes = num_bytes
        self._move: Callable[[], None] | None = move
        self._on_visible = on_visible
        self._finished = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        assert self._move is not None
        try:
            self._move()
        except Exception as error:  # noqa: BLE001 - whoever waits for the copy gets it
            self._error = error
        finally:
            self._move = None  # it keeps both ends alive
            self._finished.set()

    def wait(self) -> None:
        self.synchronize()
        on_visible, self._on_visible = self._on_visible, None
        if on_visible is not None:
            on_visible()

    def synchronize(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._finished.is_set()


class _Link:
    """One direction: copies one after the other, each as late as rate and latency say."""

    def __init__(self, name: str, bytes_per_s: float | None, latency_s: float) -> None:
        self._name = name
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._copies: queue.SimpleQueue[tuple[_LinkCopy, float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"offload-emulated-{self._name}", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._copies.put(None)
            self._thread.join()
            self._thread = None

    def submit(self, copy: _LinkCopy) -> None:
        self.open()
        self._copies.put((copy, time.perf_counter()))

    def _run(self) -> None:
        free_s = 0.0
        while (item := self._copies.get()) is not None:
            copy, submitted_s = item
            busy_s = copy.num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
            free_s = max(submitted_s, free_s) + busy_s
            left_s = free_s + self._latency_s - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)
            copy.run()
            del copy, item


def _poison(region: memoryview) -> None:
    # Not by torch: a storage may die inside an operation that is being checked or transformed.
    np.frombuffer(region, dtype=np.uint8).fill(POISON)
