"""Counts the bytes that autograd keeps between forward and backward."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.streaming.saved import watching


class _Kept:
    """A saved tensor; it dies when autograd drops what it saved."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Counting:
    """The pack hook; what lies above need not hand down what it takes itself."""

    counts_only = True

    def __init__(self, pack: Callable[[Tensor], _Kept]) -> None:
        self._pack = pack

    def __call__(self, tensor: Tensor) -> _Kept:
        return self._pack(tensor)


class ActivationMeter:
    """The most bytes of saved tensors at one time, counted once per storage.

    It lies below the session's hooks, which hand down every tensor that is not in an arena, and
    watches what these know of else: tensors that a checkpoint computed again, and those that are
    moved away and back. Values pass through untouched.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._current_bytes = 0
        self._left_out: frozenset[int] = frozenset()
        self._uses: dict[int, int] = {}

    @contextmanager
    def counting(self, *, without: Iterable[Tensor] = ()) -> Iterator[None]:
        """Counts what is saved inside.

        Args:
            without: Tensors whose storages are not activations, such as parameters.
        """
        self._left_out = frozenset(
            tensor.untyped_storage().data_ptr()
            for tensor in without
            if tensor.layout is torch.strided and tensor.numel()
        )
        counting = torch.autograd.graph.saved_tensors_hooks(_Counting(self._pack), _unpack)
        with watching(self._note), counting:
            yield

    def _pack(self, tensor: Tensor) -> _Kept:
        # Detached: an output of the node that saves it would otherwise keep that node alive.
        kept = _Kept(tensor.detach())
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address and address not in self._left_out:
                self._add(address, storage.nbytes())
                weakref.finalize(kept, self._drop, address, storage.nbytes()).atexit = False
        return kept

    def _note(self, tensor: Tensor) -> None:
        """Counts a tensor that is not packed here for as long as its storage lives."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address and address not in self._left_out:
            self._add(address, num_bytes)
            weakref.finalize(storage, self._drop, address, num_bytes).atexit = False

    def _add(self, address: int, num_bytes: int) -> None:
        uses = self._uses.get(address, 0)
        self._uses[address] = uses + 1
        if uses == 0:
            self._current_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._current_bytes)

    def _drop(self, address: int, num_bytes: int) -> None:
        self._uses[address] -= 1
        if self._uses[address] == 0:
            del self._uses[address]
            self._current_bytes -= num_bytes


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor
