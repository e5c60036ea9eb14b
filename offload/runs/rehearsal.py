"""In which order the passes of a model use its units: rehearsed on the meta device, once.

Modules that share parameters, or that are called twice, use a unit more than once; what backward
asks for are the weights that autograd saved. Only a pass shows both, and it needs no values. What
was seen are modules and parameters: any cut of the model into units is looked up in it.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from offload.config import Config
from offload.plan.uses import CallEnd, Uses
from offload.runs.model import build_meta_model
from offload.runs.spilled import spilled_bytes
from offload.streaming.discovery import DiscoveredModel


class _Kind(Enum):
    """What happened in a pass to a module or a parameter."""

    BEGUN = "a call of the module began"
    ENDED = "it ended, in whatever way"
    GIVEN = "a function got the parameter"
    SAVED = "autograd asked for the parameter that it had saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    kind: _Kind
    subject: nn.Module | nn.Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    loss: object
    events: Sequence[_Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    events: Sequence[_Event]
    without_gradient: Sequence[nn.Parameter]
    """Trainable ones that the loss does not depend on."""
    arrivals: Sequence[nn.Parameter]
    """Trainable ones in the order in which their gradients were complete."""


class RehearsedModel:
    """The model of a run without values; each of its passes runs when it is first asked about.

    Attributes:
        module: On the meta device.
    """

    def __init__(self, module: nn.Module, *, batch: int, context: int) -> None:
        self.module = module
        self._shape = (batch, context)
        self._watch = _Watch(module)
        self._spilled: dict[tuple[str, str], int | None] = {}

    @staticmethod
    def of(config: Config) -> "RehearsedModel":
        """Returns the model of a run; no pass of it has run yet.

        Raises:
            ConfigError: It can't be built.
        """
        module = build_meta_model(config.model)
        return RehearsedModel(module, batch=config.train.batch, context=config.model.context)

    @property
    def needs_values(self) -> bool:
        """Whether its forward can't be run without values."""
        return self._forward is None

    @property
    def loss(self) -> object:
        """What its forward returns; None where that needs values, too."""
        return self._forward.loss if self._forward else None

    def uses(self, discovered: DiscoveredModel) -> Uses:
        """Returns the units that a micro-step uses, in order.

        Where the model needs values these are taken to be in the order of its modules.

        Args:
            discovered: Its units, however it is cut.
        """
        if self._forward is None or self._backward is None:
            return uses_by_modules(self.module, discovered)
        forward = _calls_in(self._forward.events, discovered)
        backward = _calls_in(self._backward.events, discovered)
        return Uses(
            forward=tuple(forward.uses), backward=tuple(backward.uses), ends=tuple(forward.ends)
        )

    def without_gradient(self, discovered: DiscoveredModel) -> frozenset[str]:
        """Returns the names of trainable parameters that get no gradient; none if it needs values.

        Args:
            discovered: Its units, however it is cut.
        """
        found = {id(each) for each in self._backward.without_gradient} if self._backward else set()
        return frozenset(
            name
            for unit in discovered.units
            for name, parameter in unit.parameters.items()
            if id(parameter) in found
        )

    def arrivals(self, discovered: DiscoveredModel) -> tuple[str, ...]:
        """Returns the names of parameters in the order of their gradients; none if it needs values.

        Args:
            discovered: Its units, however it is cut.
        """
        name_of = {id(p): name for unit in discovered.units for name, p in unit.parameters.items()}
        found = self._backward.arrivals if self._backward else ()
        return tuple(name_of[id(parameter)] for parameter in found)

    def spilled_bytes(self, config: Config) -> int | None:
        """Returns the most bytes of spill files, as `offload.runs.spilled` counts them.

        Args:
            config: Of the run, under any policy.
        """
        key = (config.activations.model_dump_json(), config.units.model_dump_json())
        if key not in self._spilled:
            self._spilled[key] = spilled_bytes(config)
        return self._spilled[key]

    @cached_property
    def _forward(self) -> _Forward | None:
        saved = saved_tensors_hooks(lambda tensor: tensor.detach(), self._watch.unpack)
        try:
            with _without_values(), self._watch.calls(), self._watch, saved:
                tokens = torch.zeros(self._shape, dtype=torch.int64)
                loss = self.module(tokens, tokens)
        except Exception:  # noqa: BLE001 - whatever the user's code raises without values
            return None
        return _Forward(loss=loss, events=self._watch.take())

    @cached_property
    def _backward(self) -> _Backward | None:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        loss: Any = self.loss
        found: Sequence[Tensor | None] = ()
        arrivals: list[nn.Parameter] = []
        try:
            with _without_values(), self._watch.calls(), _noting_arrivals(trained, arrivals):
                if trained:
                    found = torch.autograd.grad(loss, trained, allow_unused=True)
        except Exception:  # noqa: BLE001 - whatever the user's code raises without values
            return None
        without = [p for p, gradient in zip(trained, found, strict=True) if gradient is None]
        return _Backward(events=self._watch.take(), without_gradient=without, arrivals=arrivals)


def uses_by_modules(model: nn.Module, discovered: DiscoveredModel) -> Uses:
    """Returns the uses of a model whose modules are called once each, in their order."""
    calls = _Calls()
    backward: list[int] = []

    def walk(module: nn.Module) -> None:
        units = _units_of(module, discovered)
        calls.begin(units)
        if not isinstance(module, nn.Embedding):  # backward asks for none of its weights
            backward.extend(units)
        for child in module._modules.values():
            if child is not None:
                walk(child)
        calls.end(units)

    walk(model)
    return Uses(
        forward=tuple(calls.uses), backward=tuple(reversed(backward)), ends=tuple(calls.ends)
    )


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    with torch.device("meta"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


@contextlib.contextmanager
def _noting_arrivals(
    parameters: Iterable[nn.Parameter], arrivals: list[nn.Parameter]
) -> Iterator[None]:
    """Adds each parameter to `arrivals` when a backward has its gradient."""

    def note(parameter: nn.Parameter, _gradient: Tensor) -> None:
        arrivals.append(parameter)

    handles = [
        each.register_hook(partial(note, each))  # type: ignore[no-untyped-call]
        for each in parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchFunctionMode):
    """Notes the calls of modules, parameters outside them, and those that autograd asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._events: list[_Event] = []
        self._model = model
        self._own = {id(parameter) for parameter in model.parameters()}
        self._parameter_of_memory = {_memory_of(each): each for each in model.parameters()}

    def take(self) -> Sequence[_Event]:
        """Returns what was noted since the last time."""
        events, self._events = self._events, []
        return events

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, nn.Parameter) and id(each) in self._own:
                self._note(_Kind.GIVEN, each)
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Watches the calls of all modules."""
        handles = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(self._begin))
            handles.append(module.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def unpack(self, tensor: Tensor) -> Tensor:
        """Notes a weight that autograd saved and asks for."""
        is_strided = tensor.layout is torch.strided
        parameter = self._parameter_of_memory.get(_memory_of(tensor)) if is_strided else None
        if parameter is not None:
            self._note(_Kind.SAVED, parameter)
        return tensor

    def _begin(self, module: nn.Module, _args: Any) -> None:
        self._note(_Kind.BEGUN, module)

    def _end(self, module: nn.Module, _args: Any, _result: Any) -> None:
        self._note(_Kind.ENDED, module)

    def _note(self, kind: _Kind, subject: nn.Module | nn.Parameter) -> None:
        self._events.append(_Event(kind=kind, subject=subject))


class _Calls:
    """Uses of units, in order; inside a call that has a unit there is none of that unit."""

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


def _calls_in(events: Sequence[_Event], discovered: DiscoveredModel) -> _Calls:
    """Returns the units that a pass used, in order: a call holds those that it needs."""
    unit_of = {
        id(parameter): index
        for index, unit in enumerate(discovered.units)
        for parameter in unit.parameters.values()
    }
    calls = _Calls()
    for event in events:
        if isinstance(event.subject, nn.Module):
            units = _units_of(event.subject, discovered)
            (calls.begin if event.kind is _Kind.BEGUN else calls.end)(units)
            continue
        index = unit_of[id(event.subject)]
        # Of what autograd asks for a run of one unit's weights is one use.
        if event.kind is _Kind.GIVEN or calls.uses[-1:] != [index]:
            calls.use(index)
    return calls


def _units_of(module: nn.Module, discovered: DiscoveredModel) -> tuple[int, ...]:
    return discovered.needs.get(module, discovered.owners.get(module, ()))


def _memory_of(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        address: int = tensor.untyped_storage()._cdata
    return address
