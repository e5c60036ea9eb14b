"""What the engine asks of a device, whatever it is.

[Note: what makes a copy visible]
A copy to the device is asynchronous. What fills a slot is ordered in three steps: the copy starts
only after the last use of the slot's former bytes (its storage died then, or `note_uses` was
called), computing starts only after the copy, which
`Copy.wait` sees to, and the host memory that it reads is reused only after `Copy.synchronize`, or
once `Copy.done`. `wait` need not block: on CUDA it makes the current stream wait for an event, and
the host memory may still be read after it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from offload.memory import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """The memory of a device, as it says itself."""

    total_bytes: int
    free_bytes: int


class Copy(Protocol):
    """A copy between host and device in flight.

    Ownership: Both ends belong to the copy until it is done.
    """

    def wait(self) -> None:
        """Orders what this thread computes on the device from now on after the copy."""
        ...

    def synchronize(self) -> None:
        """Blocks until the bytes have arrived."""
        ...

    def done(self) -> bool:
        """Returns whether the bytes have arrived."""
        ...


class Device(ABC):
    """Where a model computes, with an arena for what it computes with.

    Attributes:
        copied_in_bytes: Copied to the device since the beginning; 0 where nothing has to be.
        copied_out_bytes: Copied from it.
        registered_bytes: Of host memory that is registered now.

    Concurrency: `copy_in` and `copy_out` may be called from any thread; storages that give slots
        back may die in any thread.
    """

    kind: ClassVar[str]
    """As in `tiers.device.kind`."""
    is_unified: ClassVar[bool] = False
    """Whether host arenas are device arenas, so that nothing is copied."""
    computes_later: ClassVar[bool] = False
    """Whether work is done after the call that asks for it, so that reading a value of its memory
    waits for everything that was asked for before."""
    copied_in_bytes = 0
    copied_out_bytes = 0
    _counting: ClassVar[threading.Lock] = threading.Lock()
    """Over the counts of all devices."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The torch device of the model's tensors."""

    @property
    def registered_bytes(self) -> int:
        return 0

    @property
    def is_captured(self) -> bool:
        """Whether what this thread asks for is not done but recorded, to be done again later."""
        return False

    def count(self, *, in_bytes: int = 0, out_bytes: int = 0) -> None:
        """Adds to what was copied; any thread."""
        with self._counting:
            self.copied_in_bytes += in_bytes
            self.copied_out_bytes += out_bytes

    @abstractmethod
    def open(self) -> None:
        """Takes streams or threads; may be called again."""

    @abstractmethod
    def close(self) -> None:
        """Waits for copies in flight and gives back what `open` took; may be called again."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Region:
        """Returns device memory of exactly `num_bytes`, cut like a sequence of bytes.

        Raises:
            BudgetError: The device has not so much memory.
        """

    @abstractmethod
    def tensor_over(
        self, region: Region, *, on_death: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Returns a uint8 tensor over device memory, in a storage of its own.

        `on_death` is called when the last tensor of that storage is gone; see [Note: a slot
        belongs to a storage object] in `offload.memory.storages`.
        """

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Returns a uint8 tensor in memory outside the arena, for `copy_in` to fill."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def register_host(self, memory: memoryview) -> None:
        """Makes host memory fit for asynchronous copies.

        Raises:
            BudgetError: It can't be locked; nothing of it is.
        """
        del memory

    def unregister_host(self, memory: memoryview) -> None:
        """Ends what `register_host` did."""
        del memory

    @abstractmethod
    def copy_in(self, source: memoryview, into: torch.Tensor) -> Copy:
        """Starts copying host bytes into `into`, uint8 and as long as `source`.

        It begins after the last use of the slot under `into`.
        """

    def note_uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says that what this thread has computed so far uses the storages of `tensors`.

        Copies into these that are asked for later begin after it. For memory that stays in use
        while its bytes change.
        """
        del tensors

    def follow(self, stream: object) -> object:
        """Orders what this thread computes from now on after what was asked of `stream` so far.

        Args:
            stream: What this returned in another place; None: nothing.

        Returns:
            What orders this thread's computing now; None where it is done as it is asked for.
        """
        del stream
        return None

    @abstractmethod
    def copy_out(self, source: torch.Tensor, into: torch.Tensor) -> Copy:
        """Starts copying a device tensor into a host tensor of its shape and dtype.

        It begins after what this thread has computed so far.
        """

    @abstractmethod
    def memory_facts(self) -> MemoryFacts:
        """Returns the device's memory and how much of it is free."""
