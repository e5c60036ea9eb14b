"""What a wrapped model has in memory, as its plans say: taken, laid out, filled."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from offload.devices import Device
from offload.errors import ConfigError
from offload.layout import ModelLayout
from offload.memory import Budget, large_blocks_mapped
from offload.optim.kernels import Kernels
from offload.optim.model_state import ModelState
from offload.optim.readers import StateParts
from offload.optim.seen_parameters import SeenParameters
from offload.optim.window import Window
from offload.plan.device import DevicePlan
from offload.plan.gradients import spilled_sizes
from offload.plan.host import HostPlan
from offload.storage.spill import Spill
from offload.storage.store import BlockStore
from offload.streaming.adoption import Adoption
from offload.streaming.building import Building
from offload.streaming.device_memory import DeviceMemory
from offload.streaming.device_parameters import DeviceParameters
from offload.streaming.gradients import Gradients, open_gradients
from offload.streaming.host_memory import HostMemory
from offload.streaming.link_waits import LinkWaits
from offload.streaming.wrap_options import WrapOptions


class ModelMemory:
    """The memory of one wrapped model, and where in it its parameters and its state are.

    Attributes:
        host: All host memory; taken by `open`.
        on_device: The memory of a device that has its own; None where it has none.
        device_parameters: Parameters that live there; None where none do.
        gradients: The accumulators; None where the model is not trained.
        state: Where parameters and optimizer state are; another one after `change_rule`.
        window: Of the records that are read, updated and written; likewise.

    Concurrency: The thread that runs the model.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        options: WrapOptions,
        device: Device,
        store: BlockStore | None,
        host_budget: Budget | None,
        device_budget: Budget | None,
        link_waits: LinkWaits,
    ) -> None:
        """Stores its arguments.

        Args:
            parameters: By name; may be filled until `open`.
            options: How the model is wrapped.
            device: Where it computes.
            store: Of what is not resident.
            host_budget: Of all models of the session.
            device_budget: The same on a device with memory of its own.
            link_waits: Counts waits for copies to and from it.
        """
        self.host: HostMemory
        self.on_device: DeviceMemory | None = None
        self.device_parameters: DeviceParameters | None = None
        self.gradients: Gradients | None = None
        self.state: ModelState
        self.window: Window
        self._parameters = parameters
        self._options = options
        self._device = device
        self._store = store
        self._host_budget = host_budget
        self._device_budget = device_budget
        self._link_waits = link_waits
        self._plan: HostPlan
        self._flat: dict[str, torch.Tensor] | None = None
        self._is_registered = False
        self._seen: SeenParameters | None = None

    def open(
        self,
        layout: ModelLayout,
        *,
        plan: HostPlan,
        device_plan: DevicePlan,
        kernels: Kernels,
        make_spill: Callable[[int], Spill] | None,
        before_gradient: Callable[[str], None],
        on_gradient: Callable[[str], None] | None,
    ) -> None:
        """Takes what is planned; nothing of the model is in it yet.

        Args:
            layout: Of the model.
            plan: Of host memory.
            device_plan: Of a device with memory of its own.
            kernels: For norms of gradients.
            make_spill: Gives spill files for pieces of so many bytes.
            before_gradient: Called with a parameter's name before its gradient changes.
            on_gradient: Called with a parameter's name when its gradient is there; None: nobody
                waits for it.

        Raises:
            BudgetError: Other models of the session have too much.
            StorageError: The spill files can't be made.
        """
        self._plan = plan
        self.host = HostMemory(plan, self._host_budget)
        if not self._device.is_unified:
            self._device.register_host(self.host.whole)
            self._is_registered = True
            self.on_device = DeviceMemory(device_plan, self._device, self._device_budget)
        if self._options.is_training:
            self.gradients = open_gradients(
                layout,
                self._parameters,
                plan=plan.gradients,
                memory=self.host,
                device=self._device,
                link_waits=self._link_waits,
                kernels=kernels,
                make_spill=make_spill,
                before_write=before_gradient,
                on_arrival=on_gradient,
            )
        if self._options.parameters != "storage":
            self._flat = self.host.flat_parameters(layout)
            if self._device.is_unified:
                self._seen = SeenParameters(
                    layout, self._flat, is_trained=self._options.is_training
                )
        if self._options.parameters == "device":
            assert self._flat is not None
            assert self.on_device is not None
            self.device_parameters = DeviceParameters(
                layout,
                self._flat,
                region=self.on_device.parameters,
                device=self._device,
                link_waits=self._link_waits,
            )
        self._lay_out(layout)

    def close(self) -> None:
        """Ends what is under way to or from it; gradients that are shown stay readable.

        May be called again, and where it was not opened.
        """
        if self.gradients is not None:
            self.gradients.close()
        if self._is_registered:
            self._is_registered = False
            self._device.unregister_host(self.host.whole)

    def adopt(self, *, building: Building | None, is_resumed: bool) -> None:
        """Moves the model's parameters, or those of the resumed store, to where they will live.

        Args:
            building: What the model was built with.
            is_resumed: Whether the store has its parameters and its state.
        """
        adoption = Adoption(self.state, self._parameters, building=building, is_resumed=is_resumed)
        adoption.fill_records()
        with large_blocks_mapped():  # those that were built come back one by one
            if self.state.parameters is not None:
                adoption.make_resident()
            elif self.host.slots is not None:
                adoption.make_stored(self.host.slots)

    def read_back(self) -> None:
        """Reads what is resident from the store again, and drops gradients and pending edits.

        Units must have left their slots before the store changed.
        """
        self.window.drop_cached()
        for parameter in self._parameters.values():
            parameter.grad = None
        self.state.edited.clear()
        self.state.dirty.clear()
        adoption = Adoption(self.state, self._parameters, building=None, is_resumed=True)
        adoption.fill_records()
        if self.state.parameters is not None:
            is_unified = self._device.is_unified
            adoption.read_parameters(are_streamed=self._options.is_streamed(is_unified=is_unified))

    def change_rule(self, layout: ModelLayout, needed: HostPlan) -> None:
        """Lays the state out for another update rule, of which there is no state yet.

        Args:
            layout: The same but for the rule.
            needed: The plan that it would have got.

        Raises:
            ConfigError: The state does not fit what was planned.
        """
        if (
            needed.state_buffer_bytes > self._plan.state_buffer_bytes
            or needed.resident_state_bytes > self._plan.resident_state_bytes
        ):
            raise ConfigError(
                f"cannot make an optimizer with update rule `{layout.rule}`: its state does not "
                f"fit the memory that was planned for `{self.state.layout.rule}`; say what it "
                "will be when the session is made, such as `Session(optimizer=...)`, and with "
                'momentum as `Session({"optimizer": {"name": "sgd", "momentum": 0.9}})`'
            )
        before = self.state
        self._lay_out(layout)
        self.state.edited |= before.edited
        self.state.dirty |= before.dirty

    @contextlib.contextmanager
    def reading(self, *, make_room: Callable[[], None]) -> Iterator[StateParts]:
        """Lends what reads parameters and state, from memory or the store.

        Args:
            make_room: Called to give slots back where all are taken.

        Raises:
            BudgetError: All slots are held.
        """
        state, layout = self.state, self.state.layout
        stored = [] if state.parameters is not None else layout.subgroups.values()
        largest = max((s.padded_parameter_bytes for each in stored for s in each), default=0)
        with self.host.lend_scratch(largest, make_room=make_room) as scratch:
            yield StateParts(
                store=self._store,
                scratch=scratch,
                parameters=state.parameters,
                records=state.records,
                cached=self._cached_states(),
            )

    def _cached_states(self) -> dict[str, memoryview]:
        states = ((r.name, self.window.cached_state(r)) for r in self.state.layout.records)
        return {name: state for name, state in states if state is not None}

    def _lay_out(self, layout: ModelLayout) -> None:
        options, plan, host = self._options, self._plan, self.host
        has_records = options.is_training and options.optimizer == "host"
        self.state = ModelState(
            layout=layout,
            store=self._store,
            parameters=self._flat,
            elsewhere=self.device_parameters,
            seen=self._seen,
            records=host.records(layout) if has_records else None,
            gradients=self.gradients.flat if self.gradients else {},
            spilled=self.gradients.spilled if self.gradients else None,
            has_fp32_gradients=options.gradient_dtype == "float32",
        )
        self.window = Window(
            layout,
            states=host.states,
            parameters=host.parameters,
            num_cached=plan.num_cached,
            num_places=plan.num_places,
            gradients=host.gradient_buffers,
            gradient_bytes=spilled_sizes(layout, plan.gradients),
        )
