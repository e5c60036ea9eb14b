"""A wrapped model whose parameters live on storage: what happens around each module's call.

[Note: transforms of torch.func]
Inside one, operations on any tensor are the transform's, and those that differentiate refuse
saved-tensor hooks. So the engine steps out of it for what it does itself, and leaves the hooks out:
what is recorded refers to parameters, whose units then stay in their slots until it is gone.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from offload.errors import StoreError
from offload.streaming.discovery import DiscoveredModel
from offload.streaming.parameters import PickledCopies, StreamedParameters, close_parameters
from offload.streaming.residency import Residency
from offload.streaming.resident import ResidentUnits
from offload.streaming.saved import SavedTensorHooks
from offload.streaming.swap import Call, attach, detach
from offload.streaming.tiles import BeginRows, WideWeight, forward_of
from offload.streaming.torch_private import (
    is_in_backward,
    is_traced,
    is_transformed,
    outside_transforms,
    pop_saved_tensor_hooks,
)

_RUNNING = "the thread that runs a call"
_IN_THE_STORE = (
    "its values are in the store, if they were committed; use the model, and take "
    "`model.state_dict()`, inside the `with` block"
)


class StreamedModel:
    """Attaches a residency to a model's modules, and takes it off again on `close`.

    Concurrency: One thread at a time runs the model.
    """

    def __init__(
        self,
        model: nn.Module,
        discovered: DiscoveredModel,
        residency: Residency | ResidentUnits,
        begin_rows: BeginRows | None = None,
        *,
        require_usable: Callable[[], None],
        on_error: Callable[[BaseException], None],
        on_pass: Callable[[], None],
        on_graph: Callable[[], None] = lambda: None,
    ) -> None:
        """Stores its arguments.

        Args:
            model: To attach to.
            discovered: Its units.
            residency: What brings them.
            begin_rows: Takes gradients of wide parameters; None: the model is not trained.
            require_usable: Called before parameters are used; raises where they must not be.
            on_error: Called with what ends a call or a look at a parameter.
            on_pass: Called before each forward of the model.
            on_graph: Called after each call of a unit, or of the model, that autograd records.
        """
        self.model = model
        self._require_usable = require_usable
        self._on_error = on_error
        self._on_pass = on_pass
        self._on_graph = on_graph
        self._begin_rows = begin_rows
        self.residency = residency
        self._discovered = discovered
        # Autograd may keep what stays in memory: a step raises the version of what it saved.
        self._hooks = SavedTensorHooks(residency) if isinstance(residency, Residency) else None
        self._unit_of: dict[int, int] = {}
        self._depth = 0
        self._running: dict[str, int] = {}  # the thread that runs a call, while one does

    def open(self) -> None:
        """Swaps the classes of the modules that own parameters, of units and of the root."""
        for index, unit in enumerate(self._discovered.units):
            for parameter in unit.parameters.values():
                self._unit_of[id(parameter)] = index
        needs, owners = self._discovered.needs, self._discovered.owners
        pickled = PickledCopies()
        for module in list(self.model.modules()):
            if module in needs or module in owners or module is self.model:
                units = needs.get(module, owners.get(module, ()))
                held = tuple(index for index in units if index not in self._discovered.wide)
                attachment = _Attachment(self, units=held, is_unit=module in needs)
                attach(module, attachment, forward=self._forward_in_pieces(module))
            if module in owners:
                parameters = StreamedParameters(module._parameters, self._on_access, pickled)
                module.__dict__["_parameters"] = parameters

    def close(self) -> None:
        """Gives the modules their classes back; streamed parameters can't be used any more."""
        for module in self.model.modules():
            if isinstance(module._parameters, StreamedParameters):
                if isinstance(self.residency, ResidentUnits):
                    module.__dict__["_parameters"] = dict(dict.items(module._parameters))
                else:
                    close_parameters(module, found=_IN_THE_STORE)
            detach(module)

    def after_update(self) -> None:
        """Begins to fetch what the next training forward needs first."""
        self.residency.trace.end_step()
        self.residency.prefetch()

    def run(self, call: Call, units: tuple[int, ...], is_unit: bool, args: Any, kwargs: Any) -> Any:
        """Runs a module's call, while no other thread runs one of the model.

        Raises:
            StoreError: One does: both would move each other's units.
        """
        if self._hooks is None or is_in_backward():
            return self._run(call, units, is_unit, args, kwargs)
        is_first = not self._running
        try:
            # One step, between which no thread comes.
            self._require_this_thread(self._running.setdefault(_RUNNING, threading.get_ident()))
            return self._run(call, units, is_unit, args, kwargs)
        finally:
            if is_first and self._running.get(_RUNNING) == threading.get_ident():
                self._running.clear()

    def _require_this_thread(self, owner: int | None) -> None:
        if owner not in (None, threading.get_ident()):
            raise StoreError(
                "cannot use a wrapped model in two threads at one time: expected no call of it, or "
                f"of a module in it, found one of thread {owner}; wait until that has ended, such "
                "as with a lock"
            )

    def _run(
        self, call: Call, units: tuple[int, ...], is_unit: bool, args: Any, kwargs: Any
    ) -> Any:
        """Runs a module's call with `units` held and the saved-tensor hooks on top.

        See [Note: transforms of torch.func].
        """
        self._require_values()
        in_backward = is_in_backward()
        is_outermost = self._depth == 0 and not in_backward
        depth, held, pushed = self._depth, [], False
        try:
            self._require_usable()
            with outside_transforms():
                if is_outermost:
                    self._on_pass()
                    self.residency.begin_pass(is_evaluation=not torch.is_grad_enabled())
                self._depth = depth + 1
                for index in units:
                    self.residency.hold(index)
                    held.append(index)
            pushed = self._hooks is not None and not is_transformed() and self._hooks.push()
            return call(*args, **kwargs)
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            if pushed:
                pop_saved_tensor_hooks()
            self._depth = depth
            with outside_transforms():
                for index in held:
                    self.residency.release_hold(index, evict=not in_backward)
                if is_outermost:
                    self.residency.end_pass()
            if (is_unit or is_outermost) and not in_backward and torch.is_grad_enabled():
                self._on_graph()

    def _require_values(self) -> None:
        if self._hooks is not None and is_traced():
            raise StoreError(
                "cannot trace a wrapped model: expected operations with values, found a tracer, "
                "such as of `torch.export`, `torch.jit.trace` or fake tensors, which would take "
                "what is in a slot now for the parameter; trace a plain model with the values of "
                "`model.state_dict()`"
            )

    def fill_state_dict(self, module: nn.Module, values: dict[str, Any], prefix: str) -> None:
        """Replaces placeholders in `values` by the parameters' values.

        Those of streamed ones are copies in host memory, which no budget covers: a device need not
        hold them all.
        """
        for name, parameter in dict.items(module._parameters):
            if parameter is None or id(parameter) not in self._unit_of:
                continue
            if isinstance(self.residency, Residency):
                index, residency = self._unit_of[id(parameter)], self.residency
                with self._using():
                    values[prefix + name] = residency.copy_of(index, parameter)
                continue
            self._on_access(id(parameter))
            if values[prefix + name] is not parameter:
                values[prefix + name] = parameter.detach()

    def _forward_in_pieces(self, module: nn.Module) -> Call | None:
        """Returns what computes `module` if its own weight is wide."""
        wide = self._discovered.wide.intersection(self._discovered.owners.get(module, ()))
        if not wide or not isinstance(self.residency, Residency):
            return None
        unit = self.residency.units[next(iter(wide))]
        return forward_of(module, WideWeight(unit, self.residency, self._begin_rows))

    def before_load(self, module: nn.Module) -> None:
        """Fetches what `module` owns, so that values can be copied in."""
        for parameter in dict.values(module._parameters):
            if parameter is not None:
                self._on_access(id(parameter))

    def after_load(self, module: nn.Module) -> None:
        """Gives the memory of wide parameters back, which values were copied into."""
        residency = self.residency
        if not isinstance(residency, Residency):
            return
        for index in self._discovered.wide.intersection(self._discovered.owners.get(module, ())):
            if not residency.units[index].kept_names:
                with self._using():
                    residency.evict(residency.units[index])

    def _on_access(self, parameter_id: int) -> None:
        """Fetches a parameter that is used outside its module's call."""
        index = self._unit_of.get(parameter_id)
        if index is None or self.residency.units[index].num_holds > 0:
            return
        with self._using():
            if self._depth > 0 or is_in_backward():
                self.residency.access(index, parameter_id)
            else:
                self.residency.look(index, parameter_id)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Uses parameters outside their module's call, if they may be."""
        self._require_values()
        if self._hooks is not None and not is_in_backward():
            self._require_this_thread(self._running.get(_RUNNING))
        try:
            self._require_usable()
            with outside_transforms():
                yield
        except BaseException as error:
            self._on_error(error)
            raise


class _Attachment:
    """What one swapped module needs; see `offload.streaming.swap.Attachment`."""

    __slots__ = ("_model", "is_unit", "units")

    def __init__(self, model: StreamedModel, *, units: tuple[int, ...], is_unit: bool) -> None:
        self._model = model
        self.units = units
        self.is_unit = is_unit

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._model.run(call, self.units, self.is_unit, args, kwargs)

    def fill_state_dict(self, module: nn.Module, values: dict[str, Any], prefix: str) -> None:
        self._model.fill_state_dict(module, values, prefix)

    def before_load(self, module: nn.Module) -> None:
        self._model.before_load(module)

    def after_load(self, module: nn.Module) -> None:
        self._model.after_load(module)
