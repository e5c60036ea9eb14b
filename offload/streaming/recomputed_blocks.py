"""Blocks that are computed again in backward, as their forward found them.

[Note: what is computed again changes nothing twice]
Running statistics, or the vectors of a spectral norm, change in a call. So a block is computed
again from the values that its forward began with, in memory of their own, and leaves the buffers
as they are: its activations are those of forward, and each step changes a buffer once. Buffers that
share memory share that of the copies.

[Note: a buffer that stays needs no copy]
Version counters do not tell all: batch norms count none, and no write through `.data` does. So a
copy is kept until backward of every buffer that is not known to stay. A large one, such as a mask,
is known to once its bytes were found unchanged in the first backward; from then on forward keeps
the buffer itself and its version. A look at its bytes waits for all that a device was asked for, so
later calls are looked at only where nothing is computed later than it is asked for.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import StoreError

SMALL_BYTES = 1 << 16
"""A buffer of no more is kept as a copy, without a look."""


class Place(NamedTuple):
    """Where a buffer is."""

    module: nn.Module
    name: str

    @property
    def now(self) -> torch.Tensor | None:
        """The buffer that is there now."""
        return self.module._buffers.get(self.name)

    @property
    def kind(self) -> "Kind":
        return self.module, self.name, self.module.training


Kind = tuple[nn.Module, str, bool]
"""A buffer, and whether its module is in training: running statistics stay in evaluation alone."""


class StayingBuffers:
    """Which large buffers are known to stay as they are, from forward to backward, or not to."""

    def __init__(self, *, looks_wait: bool) -> None:
        """Knows of none.

        Args:
            looks_wait: Whether a look at bytes waits for what was asked for before.
        """
        self.looks_wait = looks_wait
        self._stays: dict[Kind, bool] = {}

    def are_known(self, places: Iterable[Place]) -> bool:
        """Whether it is known of each whether it stays."""
        return all(place.kind in self._stays for place in places)

    def stay(self, places: Iterable[Place]) -> bool:
        """Whether each is known to stay."""
        return all(self._stays.get(place.kind, False) for place in places)

    def note(self, places: Iterable[Place], *, stay: bool) -> None:
        """Says of each whether it stays."""
        self._stays.update({place.kind: stay for place in places})


class _FoundMemory:
    """The buffers over one memory, as a forward finds them.

    Attributes:
        found: The buffers themselves, without their graphs.
        copies: Of their values; None where these stay.
    """

    def __init__(self, buffers: dict[Place, torch.Tensor]) -> None:
        self.found = {place: buffer.detach() for place, buffer in buffers.items()}
        self.copies: dict[Place, torch.Tensor] | None = _copies(self.found)
        self.is_small = _memory_bytes(next(iter(buffers.values()))) <= SMALL_BYTES
        self._versions = {place: buffer._version for place, buffer in buffers.items()}

    def was_counted(self) -> bool:
        """Whether a version counter shows that they were changed in place."""
        return any(each._version != self._versions[place] for place, each in self.found.items())

    def has_changed(self, places: Iterable[Place]) -> bool:
        """Looks whether what is in these places has other bytes than forward found."""
        assert self.copies is not None
        return not all(_are_equal(place.now, self.copies[place]) for place in places)

    def again(self) -> dict[Place, torch.Tensor]:
        """Returns what a call that is computed again finds, in memory that it may change.

        Raises:
            StoreError: They were changed, as they had not been before.
        """
        if self.copies is not None:
            return _copies(self.copies)
        if self.was_counted():
            place = next(iter(self.found))
            raise StoreError(
                f"cannot compute a `{type(place.module).__name__}` again for backward: expected "
                f"its buffer `{place.name}` as forward found it, found that it was changed in "
                "place between forward and backward, as it had not been before, and no copy was "
                "kept; run the forward again (copies of it are kept from now on), or replace the "
                "buffer instead of changing it"
            )
        return {place: each for place, each in self.found.items() if not _is_over(place.now, each)}


class FoundBlock:
    """What a forward finds in a block: its buffers, and whether its modules are in training."""

    def __init__(self, module: nn.Module, staying: StayingBuffers) -> None:
        self._is_forward = True
        self._staying = staying
        self._training = {each: each.training for each in module.modules()}
        self._memories = [
            _FoundMemory(buffers)
            for buffers in _by_memory(
                (Place(each, name), buffer)
                for each in self._training
                for name, buffer in each._buffers.items()
                if buffer is not None and _is_array(buffer)
            )
        ]

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Runs forward's call in the first, and computes again in each that follows."""
        if self._is_forward:
            self._is_forward = False
            yield
            self._forget_staying()
            return
        with _in_training(self._training):
            for memory in self._memories:
                self._learn(memory)
            again: dict[Place, torch.Tensor] = {}
            for memory in self._memories:
                again |= self._again(memory)
            with _showing(again):
                yield

    def _forget_staying(self) -> None:
        """Drops the copies of buffers that are known to stay, and that the call did not change."""
        for memory in self._memories:
            places = list(memory.found)
            if memory.is_small or not self._staying.stay(places):
                continue
            looks = not self._staying.looks_wait
            if memory.was_counted() or (looks and memory.has_changed(places)):
                self._staying.note(places, stay=False)
            else:
                memory.copies = None

    def _learn(self, memory: _FoundMemory) -> None:
        """Looks, in the first backward, whether large buffers stay."""
        places = list(memory.found)
        if memory.copies is None or memory.is_small or self._staying.are_known(places):
            return
        is_changed = memory.was_counted() or memory.has_changed(places)
        self._staying.note(places, stay=not is_changed)

    def _again(self, memory: _FoundMemory) -> dict[Place, torch.Tensor]:
        try:
            return memory.again()
        except StoreError:
            self._staying.note(memory.found, stay=False)
            raise


@contextlib.contextmanager
def _in_training(training: dict[nn.Module, bool]) -> Iterator[None]:
    """Has modules in training or not, and then as they are now."""
    other = {each: each.training for each, was in training.items() if each.training != was}
    try:
        for each in other:
            each.training = training[each]
        yield
    finally:
        for each, now in other.items():
            each.training = now


@contextlib.contextmanager
def _showing(buffers: dict[Place, torch.Tensor]) -> Iterator[None]:
    """Shows buffers in their places, and then what is there now."""
    now = {place: place.now for place in buffers}
    try:
        for place, buffer in buffers.items():
            place.module._buffers[place.name] = buffer
        yield
    finally:
        for place, before in now.items():
            place.module._buffers[place.name] = before


def _by_memory(
    buffers: Iterable[tuple[Place, torch.Tensor]],
) -> Sequence[dict[Place, torch.Tensor]]:
    """Returns those that share memory together."""
    groups: dict[int, dict[Place, torch.Tensor]] = {}
    for place, buffer in buffers:
        storage: Any = buffer.untyped_storage() if type(buffer) is torch.Tensor else buffer
        key = storage._cdata if type(buffer) is torch.Tensor else id(buffer)
        groups.setdefault(key, {})[place] = buffer
    return list(groups.values())


def _copies(buffers: dict[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """Returns copies of which those share memory that did."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[Place, torch.Tensor] = {}
    for place, buffer in buffers.items():
        if type(buffer) is not torch.Tensor or buffer.is_conj() or buffer.is_neg():
            copies[place] = buffer.clone()  # which bytes alone would not tell
            continue
        storage: Any = buffer.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        empty = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        copies[place] = empty.set_(
            storages[storage._cdata], int(buffer.storage_offset()), buffer.shape, buffer.stride()
        )
    return copies


def _is_array(buffer: torch.Tensor) -> bool:
    """Whether it is one array, which calls change in place, and not sparse, nested or unmade."""
    is_made = not isinstance(buffer, nn.UninitializedBuffer)
    return is_made and buffer.layout is torch.strided and not buffer.is_nested


def _are_equal(now: torch.Tensor | None, copy: torch.Tensor) -> bool:
    if now is None or now.dtype != copy.dtype or now.device != copy.device:
        return False
    return torch.equal(now, copy)


def _memory_bytes(buffer: torch.Tensor) -> int:
    return int(buffer.untyped_storage().nbytes())


def _is_over(now: torch.Tensor | None, found: torch.Tensor) -> bool:
    """Whether it is over the memory that was found, as it was."""
    if now is None or now.shape != found.shape or now.stride() != found.stride():
        return False
    return now.dtype == found.dtype and now.data_ptr() == found.data_ptr()
