"""Parameters that stay in memory, and are out of reach while an update of them is pending."""

from collections.abc import Collection, Container, Mapping

import torch
from torch import nn

from offload.errors import StoreError
from offload.layout import ModelLayout
from offload.optim.deferred import DeferredUpdates
from offload.streaming.device_parameters import DeviceParameters
from offload.streaming.placeholders import Placeholder, find_written
from offload.streaming.trace import AccessTrace, access_of


class ResidentUnit:
    """A unit whose parameters have their places in memory for good.

    Attributes:
        index: Its number.
        num_holds: Calls that use the unit now.
        hidden: Names of its parameters that point to placeholders.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_holds = 0
        self.hidden: set[str] = set()


class ResidentUnits:
    """Hides parameters while their update is pending, and shows them when they are asked for.

    What the user put in the place of a hidden parameter's data is left there: an edit.

    Concurrency: The thread that runs the model.
    """

    def __init__(
        self,
        layout: ModelLayout,
        parameters: Mapping[str, nn.Parameter],
        flat: Mapping[str, torch.Tensor],
        deferred: DeferredUpdates,
        on_device: DeviceParameters | None = None,
        *,
        reads_late: bool = False,
    ) -> None:
        """Stores its arguments.

        Args:
            layout: Of the model.
            parameters: By name.
            flat: The flat shards that they are views of, by name.
            deferred: The updates that hide them.
            on_device: What copies them to a device, if they live there.
            reads_late: Whether to look for writes to hidden parameters in `require_untouched`
                alone: looking waits for all that the device computes.
        """
        self._reads_late = reads_late
        self.units = [ResidentUnit(index) for index in range(len(layout.units))]
        self._on_device = on_device
        self.trace = AccessTrace()
        self._accessed: set[int] = set()
        self._parameters = parameters
        self._deferred = deferred
        self._unit_of: dict[str, ResidentUnit] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._placeholders: dict[str, Placeholder] = {}
        # Of hidden parameters, as their update left it.
        self._versions: dict[str, int] = {}
        for unit, described in zip(self.units, layout.units, strict=True):
            for shard in described.shards:
                for placed in shard.parameters:
                    name = placed.facts.name
                    memory = flat[shard.name][placed.start : placed.stop]
                    self._unit_of[name] = unit
                    self._views[name] = memory.view(placed.facts.shape)
                    self._placeholders[name] = Placeholder(parameters[name])

    def hide(self, names: Container[str]) -> None:
        """Points the named parameters to their placeholders."""
        for name, unit in self._unit_of.items():
            if name in names:
                unit.hidden.add(name)
                parameter = self._parameters[name]
                parameter.data = self._placeholders[name].tensor
                if parameter.numel():
                    self._versions[name] = parameter._version

    def require_untouched(self) -> None:
        """Looks for writes to hidden parameters that nobody has looked for yet.

        Raises:
            StoreError: The user wrote to one.
        """
        if self._reads_late:
            self._require_untouched(self._placeholders, reads_values=True)

    def see_versions(self) -> None:
        """Takes the version counters of hidden parameters as seen."""
        for name in self._versions:
            self._versions[name] = self._parameters[name]._version

    def show_all(self) -> None:
        """Points every parameter to its values; no update may be pending."""
        for unit in self.units:
            self._show(unit)

    # What a wrapped model's modules ask.

    def hold(self, index: int) -> None:
        """Shows a unit's parameters for a call."""
        if self.units[index].num_holds == 0:
            self.trace.record(access_of(index, is_backward=False))
            self._look(index)
        self.units[index].num_holds += 1

    def release_hold(self, index: int, *, evict: bool) -> None:
        """Ends a call's use; the parameters stay where they are."""
        del evict
        self.units[index].num_holds -= 1

    def access(self, index: int, parameter_id: int) -> None:
        """Shows a unit's parameters for a use outside its modules' calls."""
        del parameter_id
        if index not in self._accessed:
            self._accessed.add(index)
            self.trace.record(access_of(index, is_backward=False))
        self._look(index)

    def begin_pass(self, *, is_evaluation: bool) -> None:
        """Begins a forward; no call runs, so what is held was left by one that was interrupted."""
        self._accessed.clear()
        for unit in self.units:
            unit.num_holds = 0
        self.trace.begin(is_evaluation=is_evaluation)

    def end_pass(self) -> None:
        """Ends a forward, and what `access` was for."""
        self._accessed.clear()
        self.trace.end()

    def look(self, index: int, parameter_id: int) -> None:
        """Shows a unit's parameters for a look from outside a pass."""
        del parameter_id
        self._look(index)

    def _look(self, index: int) -> None:
        """Shows a unit's parameters, when their update is done.

        Raises:
            StorageError, CorruptStateError: The update failed.
            StoreError: The user wrote to a parameter while it was hidden.
        """
        unit = self.units[index]
        if unit.hidden:
            self._deferred.wait_for(index)
            self._show(unit)

    def prefetch(self) -> None:
        """Does nothing: all is in memory."""

    def _show(self, unit: ResidentUnit) -> None:
        if not unit.hidden:
            return
        if self._on_device is not None:
            self._on_device.wait(unit.index)
        shown = [name for name in sorted(unit.hidden) if not self._is_replaced(name)]
        self._require_untouched(shown, reads_values=not self._reads_late)
        for name in shown:
            self._parameters[name].data = self._views[name]
        for name in unit.hidden:
            self._versions.pop(name, None)
        unit.hidden.clear()

    def _is_replaced(self, name: str) -> bool:
        parameter = self._parameters[name]
        is_there = parameter.data_ptr() == self._placeholders[name].address
        return not is_there and parameter.numel() > 0

    def _require_untouched(self, names: Collection[str], *, reads_values: bool) -> None:
        written = [
            name
            for name in names
            if name in self._versions and self._parameters[name]._version != self._versions[name]
        ]
        if reads_values:
            written += find_written({name: self._placeholders[name] for name in names})
        if written:
            raise StoreError(
                f"cannot use parameter `{written[0]}`: expected nothing written to it while its "
                "update was pending, found a write through `parameters()` or a kept reference; "
                "edit it as an attribute of its module, such as `module.weight.copy_(values)` "
                "under `torch.no_grad()`"
            )
