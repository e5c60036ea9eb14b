"""Activations: computed again in backward, or moved away until then.

[Note: where the activation hooks lie]
They are pushed around the outermost call of a model, so they lie below those that pack parameters,
below an activation checkpoint's and below those of the user's within the model, and get what these
hand down. Hooks of the user's around the model keep their effect: then nothing is moved. A block's
input is saved by its checkpoint outside of that checkpoint's hooks, and so can be moved.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.devices import Device
from offload.memory import SlotPool
from offload.plan.activations import ActivationPlan
from offload.storage.spill import Spill
from offload.storage.stalls import StallAccount
from offload.streaming.activation_store import ActivationCounters, ActivationStore, Away
from offload.streaming.discovery import DiscoveredModel
from offload.streaming.recomputed_blocks import FoundBlock, StayingBuffers
from offload.streaming.saved import (
    HookPair,
    PassOn,
    is_watched,
    note_unseen,
    pack_below,
    unpack_below,
)
from offload.streaming.surrounding_checkpoints import is_in_checkpoint
from offload.streaming.swap import Attachment, Call, attach_around, detach_around
from offload.streaming.torch_private import (
    PackHook,
    UnpackHook,
    is_in_backward,
    pop_saved_tensor_hooks,
)
from offload.streaming.versions import counter_of, modified_message

_log = logging.getLogger("offload.streaming")

SMALLEST_SHARE = 4
"""A view of less than one part in so many of its storage stays: that storage is something else,
such as a batch or a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOptions:
    """What becomes of activations.

    Attributes:
        checkpoint: `"unit"` computes those inside each element of a module list again.
        offload: Where saved ones go until backward.
        threshold_bytes: Of the smallest storage that is moved.
        plan: Of the host memory where they lie, or through which they go.
    """

    checkpoint: Literal["none", "unit"] = "none"
    offload: Literal["none", "host", "storage"] = "none"
    threshold_bytes: int = 1
    plan: ActivationPlan = field(default_factory=ActivationPlan)

    @property
    def is_used(self) -> bool:
        return self.checkpoint != "none" or self.offload != "none"


@dataclass(slots=True, kw_only=True)
class _Moved:
    """A saved tensor whose storage was moved away.

    Attributes:
        counter: Shares the version counter of the tensor, and no memory.
    """

    away: Away
    counter: torch.Tensor
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Put:
    """A storage that was put away.

    Attributes:
        base: The tensor that was saved, or of which that was a view: others over the storage may
            have counters of their own, such as the gates of a recurrent cell.
        version: Of `base` when it was saved.
    """

    storage: weakref.ref[Any]
    base: weakref.ref[torch.Tensor]
    away: weakref.ref[Away]
    version: int


class ActivationHooks(HookPair):
    """Saved-tensor hooks that move large tensors away."""

    def __init__(
        self, store: ActivationStore, *, threshold_bytes: int, stays: Iterable[torch.Tensor]
    ) -> None:
        """Stores its arguments.

        Args:
            store: Takes the bytes.
            threshold_bytes: Of the smallest storage that is moved.
            stays: Tensors whose storages are no activations, such as parameters.
        """
        self._store = store
        self._threshold_bytes = threshold_bytes
        self._stays = frozenset(t.untyped_storage().data_ptr() for t in stays)
        # By the address of the storage object.
        self._put: dict[int, _Put] = {}

    def pack(self, tensor: torch.Tensor, below: tuple[PackHook, UnpackHook] | None) -> Any:
        if below is None or getattr(below[0], "counts_only", False):
            away = self._move(tensor) if self._may_move(tensor) else None
            if away is not None:
                note_unseen(tensor)  # until the original goes
                return _Moved(
                    away=away,
                    counter=counter_of(tensor),
                    version=tensor._version,
                    dtype=tensor.dtype,
                    offset=int(tensor.storage_offset()),
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
        return pack_below(tensor, below)

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Moved):
            return unpack_below(packed)
        found = packed.counter._version
        if found != packed.version:
            what = f"a {packed.dtype} tensor of shape {tuple(packed.shape)}"
            raise RuntimeError(modified_message(what, found=found, expected=packed.version))
        storage = self._store.get(packed.away)
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        tensor = empty.set_(storage, packed.offset, packed.shape, packed.stride)
        note_unseen(tensor)
        return tensor

    def _may_move(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.is_conj() or tensor.is_neg() or is_in_backward():
            return False
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        is_large = num_bytes >= self._threshold_bytes
        return (
            is_large
            and tensor.device == self._store.torch_device
            and tensor.numel() * tensor.element_size() * SMALLEST_SHARE >= num_bytes
            and storage.data_ptr() not in self._stays
        )

    def _move(self, tensor: torch.Tensor) -> Away | None:
        """Puts the tensor's storage away, unless it was at this version already."""
        storage = tensor.untyped_storage()
        key, base = storage._cdata, tensor if tensor._base is None else tensor._base
        put = self._put.get(key)
        if put is not None and put.storage() is storage and put.base() is base:
            away = put.away()
            if away is not None and put.version == tensor._version:
                return away
        away = self._store.put(storage)
        if away is not None:
            self._put[key] = _Put(
                storage=weakref.ref(storage, lambda _: self._put.pop(key, None)),
                base=weakref.ref(base),
                away=weakref.ref(away),
                version=tensor._version,
            )
        return away


def open_activations(
    model: nn.Module,
    discovered: DiscoveredModel,
    options: ActivationOptions,
    *,
    slots: SlotPool[memoryview] | None,
    device: Device,
    make_spill: Callable[[int], Spill] | None,
    stalls: StallAccount,
) -> "Activations":
    """Returns what cares for a model's activations, laid around its modules."""
    store = None
    if slots is not None:
        spill = None
        if options.offload == "storage":
            assert make_spill is not None, "a session whose config asks for storage has a store"
            spill = make_spill(slots.slot_bytes)
            spill.open()
        store = ActivationStore(slots=slots, device=device, spill=spill, stalls=stalls)
    activations = Activations(
        model, discovered, options, store, staying=StayingBuffers(looks_wait=device.computes_later)
    )
    activations.open()
    return activations


class Activations:
    """What happens to activations around the calls of a model and of its units.

    Concurrency: One thread at a time runs the model.
    """

    def __init__(
        self,
        model: nn.Module,
        discovered: DiscoveredModel,
        options: ActivationOptions,
        store: ActivationStore | None,
        *,
        staying: StayingBuffers,
    ) -> None:
        self._model = model
        self._staying = staying
        self._store = store
        self._depth = 0
        self._units = {
            module: unit.is_element for unit in discovered.units for module in unit.modules
        }
        self._checkpoints = options.checkpoint == "unit"
        self._hooks: ActivationHooks | None = None
        if store is not None:
            self._hooks = ActivationHooks(
                store, threshold_bytes=options.threshold_bytes, stays=_own_tensors(model)
            )

    @property
    def counters(self) -> ActivationCounters:
        return self._store.counters if self._store is not None else ActivationCounters()

    def open(self) -> None:
        """Lays itself around what is attached to the modules already."""
        num_checkpoints = 0
        for module in {self._model: False, **self._units}:
            recomputes = self._checkpoints and self._units.get(module, False)
            num_checkpoints += recomputes
            is_unit = module in self._units
            around = _Around(self, is_unit=is_unit, recomputed=module if recomputes else None)
            attach_around(module, around)
        if self._checkpoints and not num_checkpoints:
            _log.warning(
                "`activations.checkpoint` = `unit` has no effect: the model has no list of modules"
            )

    def close(self) -> None:
        """Takes itself off, and waits for what is under way."""
        for module in {self._model: False, **self._units}:
            detach_around(module)
        if self._store is not None:
            self._store.close()

    def run(self, call: Call, args: Any, kwargs: Any, *, recomputed: nn.Module | None) -> Any:
        """Runs a call with the hooks below it; that of a module to recompute in a checkpoint.

        One that lies in a checkpoint already is left to that: of two, the inner one alone would
        compute it again, with other random numbers and buffers than the outer one.
        """
        pushed = False
        depth = self._depth
        try:
            if self._hooks is not None and depth == 0 and not is_in_backward():
                pushed = self._hooks.push()
            self._depth = depth + 1
            if recomputed is None or not torch.is_grad_enabled() or is_in_checkpoint():
                return call(*args, **kwargs)
            return _checkpointed(call, args, kwargs, FoundBlock(recomputed, self._staying))
        finally:
            self._depth = depth
            if pushed:
                pop_saved_tensor_hooks()


class _Around:
    """The attachment of one module, around the one that is there."""

    def __init__(
        self, activations: Activations, *, is_unit: bool, recomputed: nn.Module | None
    ) -> None:
        self.is_unit = is_unit
        self.inner: Attachment | None = None
        self._activations = activations
        self._recomputed = recomputed

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = self.inner
        within = call if inner is None else lambda *a, **k: inner.run(call, a, k)
        return self._activations.run(within, args, kwargs, recomputed=self._recomputed)

    def fill_state_dict(self, module: nn.Module, values: dict[str, Any], prefix: str) -> None:
        if self.inner is not None:
            self.inner.fill_state_dict(module, values, prefix)

    def before_load(self, module: nn.Module) -> None:
        if self.inner is not None:
            self.inner.before_load(module)

    def after_load(self, module: nn.Module) -> None:
        if self.inner is not None:
            self.inner.after_load(module)


def _checkpointed(
    call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], found: FoundBlock
) -> Any:
    """Runs `call` in a checkpoint that saves every tensor among its arguments by hooks."""
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in kwargs.items() if name not in names}
    num_positional = len(args)  # `run` is kept until backward, and must not keep `args`

    def run(*values: Any) -> Any:
        positional = values[:num_positional]
        named = dict(zip(names, values[num_positional:], strict=True))
        pushed = is_watched() and is_in_backward() and PassOn().push()
        try:
            with found.around_call():
                return call(*positional, **named, **others)
        finally:
            if pushed:
                pop_saved_tensor_hooks()

    return checkpoint(run, *args, *(kwargs[name] for name in names), use_reentrant=False)


def _own_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields parameters and buffers in memory; looking at a streamed one would fetch it."""
    for module in model.modules():
        for own in (dict.values(module._parameters), module._buffers.values()):
            plain = (t for t in own if t is not None and t.layout is torch.strided)
            yield from (t for t in plain if t.numel())
