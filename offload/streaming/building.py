"""Building a model that is larger than memory, with its own initialisation.

While a model is built, its modules' parameters are evicted as the budget fills and fetched again
on access. Values and random state are those of a plain build, whatever the initialisation does.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import BudgetError
from offload.memory import Arena, large_blocks_mapped, storage_over
from offload.sizes import MIB, format_size, round_up
from offload.storage.store import BlockStore
from offload.streaming.placeholders import placeholder_of

CHUNK_BYTES = 4 * MIB
"""Parameters move to and from the store through one aligned buffer of this size."""


class Spill(Protocol):
    """Where evicted parameters go while the model is built."""

    def put(self, key: str, values: torch.Tensor) -> None: ...
    def take(self, key: str, into: torch.Tensor) -> None: ...
    def drop(self, key: str, *, num_bytes: int) -> None: ...


class StoreSpill:
    """Keeps evicted parameters in a block store, in chunks, until they are taken back."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._arena = Arena(CHUNK_BYTES)

    def put(self, key: str, values: torch.Tensor) -> None:
        """Writes the bytes of a contiguous tensor."""
        source = values.reshape(-1).view(torch.uint8)
        for index, first in enumerate(range(0, len(source), CHUNK_BYTES)):
            part = source[first : first + CHUNK_BYTES]
            memory = self._chunk()[: round_up(len(part), self._store.alignment)]
            storage_over(memory)[: len(part)].copy_(part)
            self._store.write(f"{key}/{index}", memory, num_bytes=len(part)).wait()

    def take(self, key: str, into: torch.Tensor) -> None:
        """Reads the bytes back into a contiguous tensor and drops them from the store."""
        target = into.reshape(-1).view(torch.uint8)
        for index, first in enumerate(range(0, len(target), CHUNK_BYTES)):
            part = target[first : first + CHUNK_BYTES]
            memory = self._chunk()[: round_up(len(part), self._store.alignment)]
            self._store.read(f"{key}/{index}", memory).wait()
            part.copy_(storage_over(memory)[: len(part)])
        self.drop(key, num_bytes=len(target))

    def drop(self, key: str, *, num_bytes: int) -> None:
        """Drops values that nobody takes back."""
        for index in range(-(-num_bytes // CHUNK_BYTES)):
            self._store.discard(f"{key}/{index}")

    def _chunk(self) -> memoryview:
        self._arena.open()
        return self._arena.whole()


class BuildingParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters` while it is built: every access brings the values back."""

    def __init__(
        self, touch: Callable[[nn.Parameter], None], is_building: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._touch = touch
        self._is_building = is_building

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._touch(parameter)
        return parameter

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        super().__setitem__(name, parameter)
        if parameter is not None:
            self._touch(parameter)

    def items(self) -> Any:
        return ((name, self[name]) for name in list(self))

    def values(self) -> Any:
        return (self[name] for name in list(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        """Returns a copy that is built too, as layers of a stack are; a plain one afterwards."""
        made: dict[str, nn.Parameter | None] = {}
        if self._is_building():
            made = BuildingParameters(self._touch, self._is_building)
        for name in list(self):
            made[name] = copy.deepcopy(self[name], memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


class Building:
    """Keeps the parameters that are being built within a budget, least recently used out first.

    Attributes:
        peak_bytes: Most bytes of built parameters that were in memory at one time.
    """

    def __init__(self, *, budget_bytes: int | None, spill: Spill | None) -> None:
        """Stores its arguments.

        Args:
            budget_bytes: None: nothing is evicted.
            spill: None: nothing can be evicted.
        """
        self._budget_bytes = budget_bytes
        self._spill = spill
        self._resident: dict[nn.Parameter, int] = {}
        self._spilled: dict[nn.Parameter, str] = {}
        self._resident_bytes = 0
        self._keys = itertools.count()
        self._modules: list[nn.Module] = []
        self._is_active = False
        self.peak_bytes = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Builds the modules that are made or copied in this context within the budget."""
        original, restore = nn.Module.__init__, nn.Module.__setstate__

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            module.__dict__["_parameters"] = BuildingParameters(self.touch, lambda: self._is_active)
            self._modules.append(module)

        def take_state(module: nn.Module, state: Any) -> None:
            restore(module, state)  # type: ignore[no-untyped-call]
            if isinstance(module._parameters, BuildingParameters):  # a deep copy
                self._modules.append(module)

        nn.Module.__init__ = init  # type: ignore[assignment, method-assign]
        nn.Module.__setstate__ = take_state  # type: ignore[method-assign]
        self._is_active = True
        try:
            with large_blocks_mapped():
                yield
        finally:
            self._is_active = False
            nn.Module.__init__ = original  # type: ignore[method-assign]
            nn.Module.__setstate__ = restore  # type: ignore[method-assign]

    def touch(self, parameter: nn.Parameter) -> None:
        """Makes sure that the values of `parameter` are in memory."""
        if parameter.is_meta:
            return
        if parameter in self._resident:
            self._resident[parameter] = self._resident.pop(parameter)
            return
        num_bytes = parameter.numel() * parameter.element_size()
        key = self._spilled.pop(parameter, None)
        if key is not None and self._spill is not None:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            self._spill.take(key, values)
            parameter.data = values
        self._resident[parameter] = num_bytes
        self._resident_bytes += num_bytes
        self._evict(keep=parameter)
        self.peak_bytes = max(self.peak_bytes, self._resident_bytes)

    def leave_room(self, num_bytes: int) -> None:
        """Lowers the budget by bytes that another owner takes from now on, and keeps to it."""
        if self._budget_bytes is not None and self._spill is not None:
            self._budget_bytes = max(self._budget_bytes - num_bytes, 0)
            self._evict()

    def forget(self, parameter: nn.Parameter) -> None:
        """Ends the care for `parameter`, whose values another owner has taken."""
        self._resident_bytes -= self._resident.pop(parameter, 0)

    @property
    def is_finished(self) -> bool:
        """Whether no module waits for another owner."""
        return not self._modules

    def release(self, model: nn.Module) -> None:
        """Gives the modules of `model`, whose values another owner has taken, plain dicts again."""
        modules = set(model.modules())
        for module in self._modules:
            if module in modules:
                _make_plain(module)
        self._modules = [module for module in self._modules if module not in modules]
        if not self._modules:  # no other model waits to be wrapped
            self.finish()

    def finish(self) -> None:
        """Gives every module that was built its plain `_parameters` back.

        What is still evicted belongs to no model any more (a weight that was tied over) and goes.
        """
        for parameter, key in self._spilled.items():
            if self._spill is not None:
                num_bytes = parameter.numel() * parameter.element_size()
                self._spill.drop(key, num_bytes=num_bytes)
        self._spilled.clear()
        self._resident.clear()
        for module in self._modules:
            _make_plain(module)
        self._modules.clear()

    def _evict(self, *, keep: nn.Parameter | None = None) -> None:
        if self._budget_bytes is None:
            return
        for parameter in list(self._resident):
            if self._resident_bytes <= self._budget_bytes or parameter is keep:
                return
            if self._spill is None:
                raise BudgetError(
                    f"cannot build the model within {format_size(self._budget_bytes)}: its "
                    f"parameters need at least {format_size(self._resident_bytes)} and there is "
                    "no storage path to evict to; set `paths`, or raise `host_memory`"
                )
            key = f"building/{next(self._keys)}"
            self._spill.put(key, parameter.data.contiguous())
            self._resident_bytes -= self._resident.pop(parameter)
            self._spilled[parameter] = key
            parameter.data = placeholder_of(parameter)


def _make_plain(module: nn.Module) -> None:
    if isinstance(module._parameters, BuildingParameters):
        module.__dict__["_parameters"] = dict(dict.items(module._parameters))
