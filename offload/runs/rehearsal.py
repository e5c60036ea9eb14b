"""In which order the passes of a model use its units: rehearsed on the meta device.

Modules that share parameters, or that are called twice, use a unit more than once; what backward
asks for are the weights that autograd saved. Only a pass shows both, and it needs no values.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from offload.plan.uses import CallEnd, Uses
from offload.streaming.discovery import DiscoveredModel


def find_uses(model: nn.Module, discovered: DiscoveredModel, tokens: Tensor) -> Uses:
    """Returns the units that a micro-step uses, in order.

    Where the model needs values these are taken to be in the order of its modules.

    Args:
        model: On the meta device.
        discovered: Its units.
        tokens: Inputs, and targets too, on the meta device.
    """
    try:
        return _rehearse(model, discovered, tokens)
    except Exception:  # noqa: BLE001 - whatever the user's code raises without values
        return uses_by_modules(model, discovered)


def uses_by_modules(model: nn.Module, discovered: DiscoveredModel) -> Uses:
    """Returns the uses of a model whose modules are called once each, in their order."""
    calls = _Calls()
    backward: list[int] = []

    def walk(module: nn.Module) -> None:
        units = _units_of(module, discovered)
        calls.begin(units)
        if not isinstance(module, nn.Embedding):  # backward asks for none of its weights
            backward.extend(units)
        for child in module.children():
            walk(child)
        calls.end(units)

    walk(model)
    return Uses(
        forward=tuple(calls.uses), backward=tuple(reversed(backward)), ends=tuple(calls.ends)
    )


def _rehearse(model: nn.Module, discovered: DiscoveredModel, tokens: Tensor) -> Uses:
    watch = _Watch(discovered)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    saved = saved_tensors_hooks(lambda tensor: tensor.detach(), watch.unpack)
    with torch.device("meta"), torch.random.fork_rng(devices=[]), watch.calls_of(model):
        with watch, saved:
            loss = model(tokens, tokens)
        forward, watch.calls = watch.calls, _Calls()
        if trained:
            torch.autograd.grad(loss, trained, allow_unused=True)
    return Uses(
        forward=tuple(forward.uses), backward=tuple(watch.calls.uses), ends=tuple(forward.ends)
    )


class _Calls:
    """Notes uses of units; inside a call that has a unit there is none of that unit."""

    def __init__(self) -> None:
        self.uses: list[int] = []
        self.ends: list[CallEnd] = []
        self._held: Counter[int] = Counter()

    def begin(self, units: Iterable[int]) -> None:
        for unit in units:
            self.use(unit)
            self._held[unit] += 1

    def end(self, units: Iterable[int]) -> None:
        for unit in units:
            self._held[unit] -= 1
            if not self._held[unit]:
                self.ends.append(CallEnd(unit=unit, num_before=len(self.uses)))

    def use(self, unit: int) -> None:
        if not self._held[unit]:
            self.uses.append(unit)


class _Watch(TorchFunctionMode):
    """Notes which units are used, in the calls of modules, outside them, and by autograd."""

    def __init__(self, discovered: DiscoveredModel) -> None:
        super().__init__()
        self.calls = _Calls()
        self._discovered = discovered
        parameters = [
            (parameter, index)
            for index, unit in enumerate(discovered.units)
            for parameter in unit.parameters.values()
        ]
        self._unit_of = {id(parameter): index for parameter, index in parameters}
        self._unit_of_memory = {_memory_of(parameter): index for parameter, index in parameters}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, nn.Parameter) and id(each) in self._unit_of:
                self.calls.use(self._unit_of[id(each)])
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def calls_of(self, model: nn.Module) -> Iterator[None]:
        """Watches the calls of the modules that need units."""
        handles = []
        for module in model.modules():
            if _units_of(module, self._discovered):
                handles.append(module.register_forward_pre_hook(self._begin))
                handles.append(module.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def unpack(self, tensor: Tensor) -> Tensor:
        """Notes a weight that autograd saved and asks for; a run of one unit's is one use."""
        index = self._unit_of_memory.get(_memory_of(tensor))
        if index is not None and self.calls.uses[-1:] != [index]:
            self.calls.use(index)
        return tensor

    def _begin(self, module: nn.Module, _args: Any) -> None:
        self.calls.begin(_units_of(module, self._discovered))

    def _end(self, module: nn.Module, _args: Any, _result: Any) -> None:
        self.calls.end(_units_of(module, self._discovered))


def _units_of(module: nn.Module, discovered: DiscoveredModel) -> tuple[int, ...]:
    return discovered.needs.get(module, discovered.owners.get(module, ()))


def _memory_of(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        address: int = tensor.untyped_storage()._cdata
    return address
