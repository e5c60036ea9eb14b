"""A wrapped model: its layout, its memory, its state, and the updates of it."""

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from offload.devices import CpuDevice, Device
from offload.errors import ConfigError, StoreError
from offload.layout import ModelLayout, ParameterFacts, build_layout, section_kinds
from offload.memory import Budget, trim_heap
from offload.optim.commit_head import CommitHead
from offload.optim.deferred import DeferredUpdates
from offload.optim.digest import state_digest
from offload.optim.gradient import Accumulator
from offload.optim.kernels import Kernels
from offload.optim.model_state import ModelState, ParameterUpdate, parameter_key
from offload.optim.readers import StateParts
from offload.optim.window import Window
from offload.optim.written import written_by_commit, written_until_commit
from offload.plan.device import DevicePlan, plan_device
from offload.plan.host import UNBOUNDED_BYTES, HostPlan, Placement, plan_host
from offload.policy import Order, resolve_overlap
from offload.storage.spill import Spill
from offload.storage.stalls import Stall
from offload.storage.store import BlockStore
from offload.streaming.activation_store import ActivationCounters
from offload.streaming.activations import (
    ActivationOptions,
    Activations,
    open_activations,
)
from offload.streaming.adoption import Adoption
from offload.streaming.buffers import ModelBuffers, move_buffers
from offload.streaming.building import Building
from offload.streaming.device_memory import DeviceMemory
from offload.streaming.discovery import DiscoveredModel, discover_units, whole_matrices
from offload.streaming.gradients import Gradients
from offload.streaming.host_memory import HostMemory
from offload.streaming.model import StreamedModel
from offload.streaming.residency import ParameterTier, Residency
from offload.streaming.resident import ResidentUnits
from offload.streaming.rollback import read_back
from offload.streaming.step_updates import StepUpdates
from offload.streaming.tier import HostUnits, StagedUnits, StoredUnits
from offload.streaming.torch_private import is_in_backward
from offload.streaming.unit import StreamedUnit
from offload.streaming.unit_modules import UnitRules
from offload.streaming.write_back import write_dirty

logger = logging.getLogger("offload.streaming")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """How a model is wrapped.

    Attributes:
        budget_bytes: Of the host tier; None: as much as the model needs.
        device_budget_bytes: Of the device tier; None: a co-resident set and what is prefetched.
        rule: The update rule for which state is planned.
        units: What the user says about units.
        name: Of a model beside the one without a name: its records begin with it, and it takes no
            more of the budgets than what it needs and what is fetched ahead.
        matrices: Glob patterns of the parameters that are updated as whole matrices.
    """

    budget_bytes: int | None
    device_budget_bytes: int | None = None
    parameters: Placement
    optimizer: Placement
    codec: str
    rule: str
    matrices: tuple[str, ...]
    gradient_dtype: Literal["parameter", "float32"]
    prefetch_distance: int
    is_training: bool
    activations: ActivationOptions = field(default_factory=ActivationOptions)
    units: UnitRules | None = None
    name: str | None = None
    overlap: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """What a model's steps moved from and to storage, padding included, or found in memory."""

    read_bytes: int = 0
    write_bytes: int = 0
    cache_hit_bytes: int = 0


class WrappedModel:
    """Keeps a model's parameters, gradients and optimizer state in their tiers.

    It is the `UpdateEngine` of the model's optimizer.

    Concurrency: One thread at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        options: WrapOptions,
        store: BlockStore | None,
        kernels: Kernels,
        order: Order,
        building: Building | None = None,
        resume: CommitHead | None = None,
        device: Device | None = None,
        host_budget: Budget | None = None,
        device_budget: Budget | None = None,
        make_spill: Callable[[int], Spill] | None = None,
    ) -> None:
        self.model = model
        self.device = CpuDevice() if device is None else device
        self.options = options
        self.steps: dict[str, int] = dict(resume.steps) if resume else {}
        self.completed_steps = resume.step if resume else 0
        self.update_s = 0.0
        self.commit_record_bytes = 0
        self.digest_read_bytes = 0
        self._budgets = host_budget, device_budget
        self._prefix = f"{options.name}/" if options.name else ""
        self._store = store
        self._kernels = kernels
        self._order = order
        self._building = building
        self._resume = resume
        self._is_resumed = resume is not None
        self._make_spill = make_spill
        self._activations: Activations | None = None
        self._names: dict[int, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._seen_versions: dict[str, int] = {}
        self._device_memory: DeviceMemory | None = None
        self._staged: StagedUnits | None = None
        self._residency: Residency | None = None
        self._streamed: StreamedModel | None = None
        self._gradients: Gradients | None = None
        overlap = options.overlap if options.is_training else "none"
        self._updates = StepUpdates(
            order=order,
            overlap=resolve_overlap(overlap),
            is_early=overlap in ("backward", "both"),
        )
        self._update_now: Callable[[nn.Parameter], ParameterUpdate | None] = lambda _: None
        self._is_accumulating = False
        self._moved_by_steps = MovedBytes()

    def open(self) -> None:
        """Lays the model out, moves its parameters to their tier and attaches to its modules.

        Raises:
            PlanError: The budget is too small; nothing was moved.
            StoreError: The resumed store holds another model.
        """
        discovered = discover_units(self.model, self.options.units)
        discovered.prefix_units(self._prefix)
        self.layout = self._lay_out(discovered)
        self._require_same_layout()
        self._co_resident_units = discovered.co_resident_units
        self.plan = self._make_plan(self.layout)
        self.device_plan = self._make_device_plan()
        self.plan.require_fit()
        self.device_plan.require_fit()
        for unit in discovered.units:
            self._parameters.update(unit.parameters)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._take_memory()
        self._adopt()
        if self._resume is not None and self._store is not None:
            self._buffers().read(self._store, self._resume.buffers)
        if self._is_streamed:
            move_buffers(self.model, self.device.torch_device)
            self._attach(discovered)
        elif self._updates.deferred is not None:
            self._attach_resident(discovered, self._updates.deferred)
        if self.options.is_training and self.options.activations.is_used:
            self._activations = open_activations(
                self.model,
                discovered,
                self.options.activations,
                slots=self._memory.activations,
                device=self.device,
                make_spill=self._make_spill,
            )
        self._note_versions()

    def close(self) -> None:
        """Applies what is pending and detaches from the model's modules; may be called again.

        Raises:
            StorageError, CorruptStateError: The pending updates failed.
        """
        try:
            self._updates.close()
        finally:
            if self._activations is not None:
                self._activations.close()
            if self._gradients is not None:
                self._gradients.close()
            if self._streamed is not None:
                self._streamed.close()
            if self._staged is not None:
                self._staged.close()
            if self._device_memory is not None:
                self.device.unregister_host(self._memory.whole)

    # What the optimizer asks.

    def use_rule(self, rule: str, *, takes_whole: bool) -> None:
        """Lays the state out for `rule`, if it is not and there is no state yet.

        Raises:
            StoreError: There is the state of another optimizer.
            ConfigError: Matrices are laid out apart for an optimizer that does not update them,
                or are not for one that does; or the state does not fit what was planned.
        """
        if takes_whole != bool(self.layout.whole):
            raise ConfigError(
                f"cannot make an optimizer that updates {'whole' if takes_whole else 'no whole'} "
                f"matrices: found {len(self.layout.whole)} of them laid out apart; make the "
                f'session {"with" if takes_whole else "without"} `optimizer="muon"`'
            )
        if rule != self.layout.rule:
            self._require_no_state(rule)
            self._change_rule(rule)

    def is_whole(self, name: str) -> bool:
        """Tells whether the parameter is laid out to be updated as a whole matrix."""
        return name in self.layout.whole

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Returns the name of a parameter of this model, or None."""
        if not self.options.is_training:
            return None
        return self._names.get(id(parameter))

    def accumulator_of(self, parameter: nn.Parameter) -> Accumulator | None:
        """Returns the gradient to apply, or None if there is none."""
        assert self._gradients is not None
        return self._gradients.accumulator_of(parameter)

    def step_of(self, name: str) -> int:
        """Returns how many updates the parameter has had."""
        return self.steps.get(name, 0)

    def follow(self, update_of: Callable[[nn.Parameter], ParameterUpdate | None]) -> None:
        """Takes what gives the update that a step would apply to a parameter now."""
        self._update_now = update_of

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Says that gradients which arrive in this context are not the last of their step."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def apply(self, updates: dict[str, ParameterUpdate]) -> None:
        """Updates the named parameters, now or under the next forward; counts a completed step.

        Raises:
            StorageError: With `errno` ENOSPC, the paths have no room for what the step may write;
                nothing was changed, and once there is room it may be done.
            StorageError, CorruptStateError: A transfer failed: the state is between two steps,
                and no commit is accepted any more.
        """
        self._updates.require_whole("update")
        started = time.perf_counter()
        self._updates.finish()
        if self._updates.early is None or not self._updates.early.has_begun:
            self._require_room_for_step()
        self._leave_slots()
        if self._gradients is not None:
            self._gradients.settle()
        step = self.completed_steps + 1
        done = self._updates.take_early(updates)
        try:
            if self._updates.deferred is None:
                self._updates.run(updates, step=step, skip=done)
            else:
                assert self._streamed is not None
                trace = self._streamed.residency.trace
                self._updates.start(updates, step=step, trace=trace, skip=done)
            for name in updates:
                self.steps[name] = self.step_of(name) + 1
                # As after any in-place update: a graph that saved the old value must not be used.
                torch.autograd.graph.increment_version(self._parameters[name])
            self.completed_steps += 1
            self._note_versions()
        except BaseException as error:  # an interrupt too: what is counted is not what is done
            self._updates.failure = error
            raise
        if self._streamed is not None:
            self._streamed.after_update()
        self.update_s += time.perf_counter() - started

    # What the session asks.

    @property
    def io_wait_s(self) -> float:
        """Time for which the caller's thread waited for storage."""
        fetches_s = self._residency.counters.io_wait_s if self._residency else 0.0
        return fetches_s + self._updates.io_wait_s + self.activations.wait_s

    @property
    def update_wait_s(self) -> tuple[float, float]:
        """Time for which passes waited for pending updates, and the part of it for storage."""
        deferred = self._updates.deferred
        return (deferred.wait_s, deferred.io_wait_s) if deferred else (0.0, 0.0)

    def moved(self) -> "MovedBytes":
        """Returns what was moved so far, without what commits wrote and digests read."""
        io = self._store.stats() if self._store is not None else None
        return MovedBytes(
            read_bytes=io.read_bytes - self.digest_read_bytes if io else 0,
            write_bytes=io.write_bytes - self.commit_record_bytes if io else 0,
            cache_hit_bytes=self._updates.pipeline.cache_hit_bytes,
        )

    def moved_by_steps(self) -> "MovedBytes":
        """Returns `moved` of when no update was pending last: differences are of whole steps."""
        return self.moved() if self._updates.deferred is None else self._moved_by_steps

    @property
    def update_read_bytes(self) -> int:
        return self._updates.pipeline.read_bytes

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """What the caller's thread waited for, longest first."""
        return self._updates.stalls.stalls()

    @property
    def activations(self) -> ActivationCounters:
        """What was moved of activations."""
        return self._activations.counters if self._activations else ActivationCounters()

    @property
    def host_peak_bytes(self) -> int:
        return self._memory.budget.peak_bytes

    @property
    def transfer_memory(self) -> memoryview:
        """Slots and windows: the memory that the I/O engine moves all the time; may be empty."""
        return self._memory.transfers

    @property
    def device_peak_bytes(self) -> int | None:
        """Most bytes leased at one time on the device; None where host arenas are its arenas."""
        return None if self._device_memory is None else self._device_memory.budget.peak_bytes

    @property
    def residency(self) -> Residency | None:
        return self._residency

    def has(self, parameter: torch.Tensor) -> bool:
        """Tells whether `parameter` is one of this model, trained or not."""
        return id(parameter) in self._names

    def require_committable(self) -> None:
        """Raises StoreError if an update failed in its middle."""
        self._updates.require_whole("commit")

    def write_for_commit(self) -> CommitHead:
        """Writes what is resident and changed; returns what a commit says of this model."""
        self.require_committable()
        assert self._store is not None
        self._updates.finish()
        before = self._store.stats().write_bytes
        self._settle_edits()
        self._require_room(written_by_commit(self.layout, self._state.dirty), what="commit")
        write_dirty(self._state, self._window, num_at_once=self.plan.num_written_at_once)
        buffers = self._buffers().write(self._store)
        self.commit_record_bytes += self._store.stats().write_bytes - before
        return CommitHead(
            step=self.completed_steps,
            layout=self.layout,
            steps=dict(self.steps),
            metadata={},
            buffers=buffers,
        )

    def leave_store(self) -> None:
        """Drops what is pending and takes every unit out of its slot: the store may change."""
        self._updates.drop()
        if self._residency is not None:
            self._residency.evict_all()

    def roll_back(self, point: CommitHead) -> None:
        """Goes back to `point`, which is current in the store now; after `leave_store`."""
        self._window.drop_cached()
        self._state.edited.clear()
        self._state.dirty.clear()
        read_back(self._state, self._parameters)
        self.steps = dict(point.steps)
        self.completed_steps = point.step
        if self._store is not None:
            self._buffers().read(self._store, point.buffers)
        for parameter in self._parameters.values():
            torch.autograd.graph.increment_version(parameter)
        self._note_versions()

    def state_digest(self) -> str:
        """Returns the digest of parameters and optimizer state."""
        self._updates.require_whole("digest")
        self._updates.finish()
        self._settle_edits()
        before = self._read_bytes()
        stored = [] if self._state.parameters is not None else self.layout.subgroups.values()
        largest = max((s.padded_parameter_bytes for each in stored for s in each), default=0)
        self._updates.pipeline.drop_prefetched()  # the digest reads through a buffer
        with self._memory.lend_scratch(largest, make_room=self._give_slots_back) as scratch:
            reader = StateParts(
                store=self._store,
                scratch=scratch,
                parameters=self._state.parameters,
                records=self._state.records,
                cached=self._cached_states(),
            )
            digest = state_digest(
                self.layout, reader, steps=self.steps, completed_steps=self.completed_steps
            )
        self.digest_read_bytes += self._read_bytes() - before
        return digest

    def _cached_states(self) -> dict[str, memoryview]:
        states = ((r.name, self._window.cached_state(r)) for r in self.layout.records)
        return {name: state for name, state in states if state is not None}

    def _read_bytes(self) -> int:
        return self._store.stats().read_bytes if self._store is not None else 0

    def _buffers(self) -> ModelBuffers:
        return ModelBuffers(self.model, self._prefix)

    # Steps of opening.

    def _lay_out(self, discovered: DiscoveredModel) -> ModelLayout:
        rule, whole = self.options.rule, whole_matrices(discovered, self.options.matrices)
        stored = self._stored_layout()
        if stored is not None:  # whatever optimizer comes, its state is there
            rule, whole = stored.rule, stored.whole
        return build_layout(
            [unit.facts for unit in discovered.units],
            codec=self.options.codec,
            rule=rule,
            whole=whole,
        )

    def _stored_layout(self) -> ModelLayout | None:
        return self._resume.layout if self._resume is not None else None

    def _require_no_state(self, rule: str) -> None:
        if self.completed_steps or self._is_resumed:
            raise StoreError(
                f"cannot make an optimizer with update rule `{rule}`: found the state of "
                f"`{self.layout.rule}` after {self.completed_steps} steps; make the optimizer "
                "that the run was started with, or start another store"
            )

    def _change_rule(self, rule: str) -> None:
        """Lays the state out anew in the memory that was planned for another rule."""
        layout = dataclasses.replace(self.layout, rule=rule)
        needed = self._make_plan(layout)
        if (
            needed.state_buffer_bytes > self.plan.state_buffer_bytes
            or needed.resident_state_bytes > self.plan.resident_state_bytes
        ):
            raise ConfigError(
                f"cannot make an optimizer with update rule `{rule}`: its state does not fit the "
                f"memory that was planned for `{self.layout.rule}`; name the optimizer when the "
                f"session is made, such as `Session(optimizer=...)`"
            )
        before, self.layout = self._state, layout
        self._lay_out_state()
        self._state.edited |= before.edited
        self._state.dirty |= before.dirty

    def _require_same_layout(self) -> None:
        stored = self._stored_layout()
        if stored is not None:
            self.require_layout(stored)

    def require_layout(self, stored: ModelLayout) -> None:
        """Raises StoreError unless `stored` is the layout of this model."""
        if stored != self.layout:
            assert self._store is not None
            raise StoreError(
                f"cannot resume from store `{self._store.root}`: expected the model that it "
                f"holds ({stored.num_parameters} parameters in {len(stored.units)} units, codec "
                f"`{stored.codec}`), found another ({self.layout.num_parameters} in "
                f"{len(self.layout.units)} units, codec `{self.layout.codec}`); build the same "
                "model, or use another store"
            )

    def _make_plan(self, layout: ModelLayout) -> HostPlan:
        budget = self.options.budget_bytes
        if budget is not None and self.options.name is None:
            return self._plan_within(layout, budget)
        needed = self._plan_within(layout, UNBOUNDED_BYTES)
        if budget is None or needed.planned_bytes > budget:
            return needed if budget is None else self._plan_within(layout, budget)
        return dataclasses.replace(needed, budget_bytes=budget)

    def _plan_within(self, layout: ModelLayout, budget_bytes: int) -> HostPlan:
        options = self.options
        return plan_host(
            layout,
            budget_bytes=budget_bytes,
            parameters=options.parameters,
            optimizer=options.optimizer,
            gradient_dtype=options.gradient_dtype,
            co_resident_units=self._co_resident_units,
            prefetch_distance=options.prefetch_distance,
            keeps_records=bool(self._order.kept(1, 1, 1)),
            is_training=options.is_training,
            is_unified=self.device.is_unified,
            activations=options.activations.plan,
        )

    def _make_device_plan(self) -> DevicePlan:
        budget = self.options.device_budget_bytes
        if budget is None or self.options.name is None:
            return self._device_plan_within(budget)
        needed = self._device_plan_within(None)
        if needed.planned_bytes > budget:
            return self._device_plan_within(budget)
        return dataclasses.replace(needed, budget_bytes=budget)

    def _device_plan_within(self, budget_bytes: int | None) -> DevicePlan:
        return plan_device(
            self.layout,
            budget_bytes=budget_bytes,
            co_resident_units=self._co_resident_units,
            prefetch_distance=self.options.prefetch_distance,
            holds_all=self.options.budget_bytes is None,
        )

    @property
    def _is_streamed(self) -> bool:
        return self.options.parameters == "storage" or not self.device.is_unified

    def _take_memory(self) -> None:
        options = self.options
        host_budget, device_budget = self._budgets
        self._memory = memory = HostMemory(self.plan, host_budget)
        if not self.device.is_unified:
            self.device.register_host(memory.whole)
            self._device_memory = DeviceMemory(self.device_plan, self.device, device_budget)
        if options.is_training:
            self._gradients = Gradients(
                self.layout,
                self._parameters,
                region=memory.gradients,
                dtype=options.gradient_dtype,
                device=self.device,
                sums_of_squares=lambda g, scales: self._kernels.sums_of_squares(g, scales=scales),
                before_write=self._before_gradient_changes,
                on_arrival=self._on_gradient,
            )
        self._lay_out_state()

    def _lay_out_state(self) -> None:
        options, memory = self.options, self._memory
        has_records = options.is_training and options.optimizer == "host"
        on_host = options.parameters == "host"
        self._state = ModelState(
            layout=self.layout,
            store=self._store,
            parameters=memory.flat_parameters(self.layout) if on_host else None,
            records=memory.records(self.layout) if has_records else None,
            gradients=self._gradients.flat if self._gradients else {},
        )
        self._window = Window(
            self.layout,
            states=memory.states,
            parameters=memory.parameters,
            num_cached=self.plan.num_cached,
        )
        self._updates.use(self._state, self._window, self._kernels)

    def _adopt(self) -> None:
        adoption = Adoption(
            self._state,
            self._parameters,
            building=self._building,
            is_resumed=self._is_resumed,
        )
        adoption.read_records()
        if self.options.parameters == "host":
            adoption.make_resident()
        elif self._memory.slots is not None:
            adoption.make_stored(self._memory.slots)
        if self._building is not None:
            self._building.release(self.model)
        trim_heap()
        if self._state.records is not None and not self._is_resumed:
            # A resident fp32 master starts as its parameter, as an edited one does.
            self._state.edited.update(
                p.name for p in self._trainable() if self._has_master(p.dtype)
            )

    def _attach(self, discovered: DiscoveredModel) -> None:
        if not self.layout.parameter_bytes:  # nothing to stream
            return
        units = [
            StreamedUnit(unit, index, self._parameters, device=self.device.torch_device)
            for index, unit in enumerate(self.layout.units)
        ]
        for unit in units:
            for binding in unit.bindings:
                binding.detach()
        slots = self._memory.slots if self._device_memory is None else self._device_memory.slots
        assert slots is not None
        self._residency = Residency(
            units,
            pool=slots,
            tier=self._make_tier(),
            prefetch_distance=self.options.prefetch_distance,
            on_edit=self._on_edit,
            device=self.device,
            stalls=self._updates.stalls,
        )
        self._streamed = StreamedModel(self.model, discovered, self._residency)
        self._streamed.open()

    def _attach_resident(self, discovered: DiscoveredModel, deferred: DeferredUpdates) -> None:
        assert self._state.parameters is not None
        resident = ResidentUnits(self.layout, self._parameters, self._state.parameters, deferred)
        self._updates.resident = resident
        self._streamed = StreamedModel(self.model, discovered, resident)
        self._streamed.open()

    def _make_tier(self) -> ParameterTier:
        if self._state.parameters is not None:
            host = HostUnits(self.layout, self._state.parameters, self.device)
            return self._updates.gate(self.layout, host) or host
        assert self._store is not None
        plain = StoredUnits(self.layout, self._store)
        stored = self._updates.gate(self.layout, plain) or plain
        if self.device.is_unified:
            return stored
        assert self._memory.slots is not None
        self._staged = StagedUnits(stored, self._memory.slots, self.device)
        return self._staged

    def _trainable(self) -> list[ParameterFacts]:
        return [p.facts for shard, p in self.layout.parameters.values() if shard.is_trainable]

    def _has_master(self, dtype: str) -> bool:
        return any(kind.name == "master" for kind in section_kinds(self.layout.codec, dtype))

    # Steps of updating and committing.

    def _before_gradient_changes(self, name: str) -> None:
        if self._updates.finish_before_gradient(name):
            self._moved_by_steps = self.moved()

    def _on_gradient(self, name: str) -> None:
        """Starts the updates for which this was the last gradient."""
        early = self._updates.early
        if early is None or self._is_accumulating or not is_in_backward():
            return
        if not early.has_begun:
            self._require_room_for_step()
        early.arrived(
            name,
            update_of=lambda each: self._update_now(self._parameters[each]),
            edited=self._state.edited,
        )

    def _leave_slots(self) -> None:
        """Notes what the user edited; stored parameters leave their slots before they change."""
        if self._residency is not None:
            self._residency.evict_all()
            return
        edited = [n for n in self._parameters if self._is_edited(n)]
        self._note_edits(edited)

    def _is_edited(self, name: str) -> bool:
        """Whether the user changed a resident parameter; data that was replaced is taken over.

        Raises:
            StoreError: It has another shape or dtype now.
        """
        assert self._state.parameters is not None
        shard, placed = self.layout.parameters[name]
        flat, parameter = self._state.parameters[shard.name], self._parameters[name]
        view = flat[placed.start : placed.stop].view(placed.facts.shape)
        if parameter.shape != view.shape or parameter.dtype != view.dtype:
            raise StoreError(
                f"cannot update parameter `{name}`: expected {tuple(view.shape)} of {view.dtype}, "
                f"found {tuple(parameter.shape)} of {parameter.dtype}; do not change a wrapped "
                "model's shapes or dtypes"
            )
        if view.numel() and parameter.data_ptr() != view.data_ptr():
            view.copy_(parameter.data)
            parameter.data = view
            return True
        return parameter._version != self._seen_versions[name]

    def _give_slots_back(self) -> None:
        assert self._residency is not None
        self._residency.evict_unheld()
        if self._staged is not None:
            self._staged.drain()
        gc.collect()

    def _settle_edits(self) -> None:
        """Brings parameters that the user edited, and their masters, to where they are stored."""
        if self._residency is not None:
            for unit in self._residency.units:
                self._residency.capture_edits(unit)
        else:
            self._leave_slots()
            self._note_versions()
        if self._state.edited:
            self._updates.run({}, step=self.completed_steps + 1)

    def _on_edit(self, unit: StreamedUnit, names: list[str]) -> None:
        del unit
        self._note_edits(names)

    def _note_edits(self, names: list[str]) -> None:
        if not names:
            return
        trainable = {n for n in names if self._parameters[n].requires_grad}
        if self.options.is_training:
            self._state.edited.update(trainable)
        if self._state.parameters is not None:
            for name in names:
                shard, placed = self.layout.parameters[name]
                self._state.dirty.update(
                    parameter_key(s)
                    for s in self.layout.subgroups[shard.name]
                    if placed.start < s.stop and s.start < placed.stop
                )
        logger.info(
            "%d parameters were edited in place (first: `%s`): they are the master again",
            len(names),
            names[0],
        )

    def _note_versions(self) -> None:
        self._seen_versions = {name: p._version for name, p in self._parameters.items()}

    def _require_room_for_step(self) -> None:
        if self._store is not None:
            commits = self._store.durability == "commit"
            groups = written_until_commit(self._state, commits=commits)
            self._require_room(groups, what=f"make step {self.completed_steps + 1}")

    def _require_room(self, groups: Sequence[Mapping[str, int]], *, what: str) -> None:
        assert self._store is not None
        self._store.require_room(groups, num_in_flight=self.plan.num_written_at_once, what=what)
