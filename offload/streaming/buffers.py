"""A model's persistent buffers, which stay in memory and go with every commit.

Running statistics and the like are part of what a resume goes on from. They are outside the
budget and outside the digest.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, StoreError
from offload.layout.units import PARAMETER_ALIGNMENT
from offload.memory import Arena, storage_over
from offload.sizes import round_up
from offload.storage.store import BlockStore

RECORD = "buffers"
"""The store's record of all buffers, end to end, each at a multiple of 64 bytes; of a model with
a name it begins with that."""


class ModelBuffers:
    """Writes the persistent buffers of a model to a store, and reads them back."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self._model = model
        self._record = prefix + RECORD

    def write(self, store: BlockStore) -> list[dict[str, Any]]:
        """Writes the values of now and returns what they are, for the head of the commit."""
        facts: list[dict[str, Any]] = []
        offset = 0
        for name, buffer in self._persistent():
            facts.append(
                {
                    "name": name,
                    "dtype": str(buffer.dtype).removeprefix("torch."),
                    "shape": list(buffer.shape),
                    "offset": offset,
                }
            )
            offset += round_up(buffer.numel() * buffer.element_size(), PARAMETER_ALIGNMENT)
        if offset == 0:
            store.discard(self._record)
            return facts
        memory = _memory(offset, store)
        base = storage_over(memory)
        base.zero_()
        for fact, (_, buffer) in zip(facts, self._persistent(), strict=True):
            _view(base, fact, buffer).copy_(buffer)
        store.write(self._record, memory, num_bytes=offset).wait()
        return facts

    def read(self, store: BlockStore, facts: list[dict[str, Any]]) -> None:
        """Gives the buffers the values of the commit that `facts` come from.

        Raises:
            StoreError: The model has other buffers.
        """
        found = [
            (name, str(buffer.dtype).removeprefix("torch."), list(buffer.shape))
            for name, buffer in self._persistent()
        ]
        expected = [(f["name"], f["dtype"], list(f["shape"])) for f in facts]
        if found != expected:
            other = next((a for a in found + expected if (a in found) != (a in expected)), found)
            raise StoreError(
                f"cannot resume the buffers of store `{store.root}`: expected those of the commit "
                f"({len(expected)}), found {len(found)}, which differ in {other}; build the same "
                "model, or use another store"
            )
        if self._record not in store:
            return
        memory = _memory(store.num_bytes(self._record), store)
        store.read(self._record, memory).wait()
        base = storage_over(memory)
        with torch.no_grad():
            for fact, (_, buffer) in zip(facts, self._persistent(), strict=True):
                buffer.copy_(_view(base, fact, buffer))

    def _persistent(self) -> Iterator[tuple[str, torch.Tensor]]:
        return _persistent(self._model)


def require_storable(model: nn.Module) -> None:
    """Raises ConfigError where a persistent buffer has values that no commit could store."""
    for name, buffer in _persistent(model):
        if isinstance(buffer, nn.UninitializedBuffer):
            found, remedy = "one without a shape yet", "run the model once before `wrap`"
        elif buffer.is_nested or buffer.layout is not torch.strided:
            found = "a nested one" if buffer.is_nested else f"the layout `{buffer.layout}`"
            remedy = "register it with `persistent=False`, and make it anew where a run goes on"
        else:
            continue
        raise ConfigError(
            f"cannot store buffer `{name}` in commits: expected an array in memory, found {found}; "
            f"{remedy}"
        )


def _persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{path}.{name}" if path else name, buffer


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves every buffer to `device`; a buffer that several modules share stays one."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]


def _memory(num_bytes: int, store: BlockStore) -> memoryview:
    arena = Arena(round_up(num_bytes, store.alignment))
    arena.open()
    return arena.whole()


def _view(base: torch.Tensor, fact: dict[str, Any], buffer: torch.Tensor) -> torch.Tensor:
    start = int(fact["offset"])
    stop = start + buffer.numel() * buffer.element_size()
    return base[start:stop].view(buffer.dtype).view(buffer.shape)
