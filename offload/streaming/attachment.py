"""What is attached to the modules of a wrapped model."""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from offload.devices import Device
from offload.errors import StoreError
from offload.layout import ModelLayout, Unit
from offload.memory import HeapHoles, SlotPool
from offload.optim.model_state import ModelState
from offload.streaming.additions import Additions
from offload.streaming.device_parameters import DeviceParameters
from offload.streaming.discovery import DiscoveredModel
from offload.streaming.model import StreamedModel
from offload.streaming.parameter_tier import ParameterTier
from offload.streaming.refusal import Refusal
from offload.streaming.residency import Residency
from offload.streaming.resident import ResidentUnits
from offload.streaming.step_updates import StepUpdates
from offload.streaming.taken import give_up, take
from offload.streaming.tier import HostUnits, StagedUnits, StoredUnits
from offload.streaming.tiles import BeginRows
from offload.streaming.unit import Edit, StreamedUnit


class Attachment:
    """Streams the units of a model, or hides resident ones whose update is pending.

    Attributes:
        residency: Of streamed units; None where none are streamed.
        streamed: The model with its modules swapped; None where nothing is attached.

    Concurrency: The thread that runs the model.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, device: Device
    ) -> None:
        """Stores its arguments; `parameters` may be filled later."""
        self.residency: Residency | None = None
        self.streamed: StreamedModel | None = None
        self._model = model
        self._parameters = parameters
        self._device = device
        self._staged: StagedUnits | None = None
        self._additions: Additions | None = None
        self._refusal: Refusal | None = None
        self._holes = HeapHoles()

    def look_for_additions(self) -> None:
        """Warns of parameters that the model got since it was wrapped.

        Before each forward where modules are attached to, else before each update.
        """
        if self._additions is not None:
            self._additions.look()

    def note_parameters(self) -> None:
        """Notes which parameters the model has as it is wrapped."""
        self._additions = Additions(self._model)
        take(self._parameters.values())

    def stream(
        self,
        discovered: DiscoveredModel,
        *,
        state: ModelState,
        updates: StepUpdates,
        slots: SlotPool[Any],
        staging: SlotPool[memoryview] | None,
        prefetch_distance: int,
        on_edit: Callable[[Sequence[Edit]], None],
        begin_rows: BeginRows | None = None,
        workspace_bytes: int,
    ) -> None:
        """Attaches so that a call fetches its unit.

        Args:
            discovered: The model's units.
            state: Where parameters are.
            updates: What an update that is pending holds back.
            slots: Where the model computes.
            staging: Host slots on the way to a device with memory of its own.
            prefetch_distance: The least.
            on_edit: Called with what the user changed of a unit.
            begin_rows: Takes gradients of wide parameters; None: the model is not trained.
            workspace_bytes: What the budget leaves to libraries.
        """
        units = [
            StreamedUnit(
                unit,
                index,
                self._parameters,
                device=self._device.torch_device,
                subgroups=_subgroups_of(unit, state.layout) if index in discovered.wide else None,
            )
            for index, unit in enumerate(state.layout.units)
        ]
        for unit in units:
            unit.begin()
        self.residency = Residency(
            units,
            pool=slots,
            tier=self._make_tier(state, updates, staging, discovered.wide),
            prefetch_distance=prefetch_distance,
            on_edit=on_edit,
            device=self._device,
            stalls=updates.stalls,
            on_backward=lambda: self._limit_holes(workspace_bytes // 2),
        )
        self.streamed = StreamedModel(
            self._model,
            discovered,
            self.residency,
            begin_rows,
            require_usable=updates.require_usable,
            on_error=updates.note_raised,
            on_pass=self._begin_pass,
            on_graph=lambda: self._limit_holes(workspace_bytes // 2),
        )
        self.streamed.open()

    def hide_pending(
        self,
        discovered: DiscoveredModel,
        *,
        state: ModelState,
        updates: StepUpdates,
        on_device: DeviceParameters | None,
    ) -> None:
        """Attaches to resident units so that a call waits for the updates of its own.

        Args:
            discovered: The model's units.
            state: Where parameters are.
            updates: What an update that is pending holds back.
            on_device: What copies them to a device, if they live there.
        """
        flat = state.parameters if on_device is None else on_device.flat
        assert flat is not None
        assert updates.deferred is not None
        resident = ResidentUnits(
            state.layout,
            self._parameters,
            flat,
            updates.deferred,
            on_device,
            reads_late=self._device.computes_later,
        )
        updates.resident = resident
        self.streamed = StreamedModel(
            self._model,
            discovered,
            resident,
            require_usable=updates.require_usable,
            on_error=updates.note_raised,
            on_pass=self._begin_pass,
        )
        self.streamed.open()

    def _begin_pass(self) -> None:
        if self._device.is_captured:
            raise StoreError(
                "cannot call a wrapped model while a graph of the device's work is captured: "
                "expected work that is done now, found such as is done again later, with whatever "
                "bytes are in these slots then; call the model outside `torch.cuda.graph`"
            )
        self.look_for_additions()

    def see_versions(self) -> None:
        """Takes the version counters of parameters as seen: the engine has moved them."""
        if self.streamed is not None:
            self.streamed.residency.see_versions()

    def refuse(self, require_usable: Callable[[], None]) -> None:
        """Has parameters refused while `require_usable` raises, also where nothing is attached."""
        if self.streamed is None and self._refusal is None:
            self._refusal = Refusal(self._model, require_usable)
            self._refusal.open()

    def end_refusal(self) -> None:
        """Undoes `refuse`, if it was called."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            refusal.close()

    def give_slots_back(self) -> None:
        """Takes every unit that no call holds out of its slot."""
        assert self.residency is not None
        self.residency.evict_unheld()
        if self._staged is not None:
            self._staged.drain()
        gc.collect()

    def _limit_holes(self, num_bytes: int) -> None:
        """Keeps holes of the heap from filling what the budget leaves to libraries."""
        if self._device.is_unified:  # else activations are not in the heap
            self._holes.limit(num_bytes)

    def close(self) -> None:
        """Detaches; may be called again."""
        self.end_refusal()
        if self._additions is not None:  # else another session may have them
            give_up(self._parameters.values())
        if self.streamed is not None:
            self.streamed.close()
        if self._staged is not None:
            self._staged.close()

    def _make_tier(
        self,
        state: ModelState,
        updates: StepUpdates,
        staging: SlotPool[memoryview] | None,
        wide: Collection[int],
    ) -> ParameterTier:
        if state.parameters is not None:
            host = HostUnits(state.layout, state.parameters, self._device)
            return updates.gate(state.layout, host) or host
        assert state.store is not None
        plain = StoredUnits(state.layout, state.store)
        stored = updates.gate(state.layout, plain, wide=wide) or plain
        if self._device.is_unified:
            return stored
        assert staging is not None
        self._staged = StagedUnits(stored, staging, self._device)
        return self._staged


def _subgroups_of(unit: Unit, layout: ModelLayout) -> list[range]:
    """Returns the bytes of each subgroup of a unit with one shard."""
    return [
        range(s.offset_bytes, s.offset_bytes + s.padded_parameter_bytes)
        for s in layout.subgroups[unit.shards[0].name]
    ]
