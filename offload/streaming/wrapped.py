"""A wrapped model: its layout, its memory, its state, and the updates of it."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from offload.devices import CpuDevice, Device
from offload.devices.opening import is_process_memory
from offload.errors import StoreError
from offload.layout import ModelLayout
from offload.memory import Budget, trim_heap
from offload.optim.commit_head import CommitHead
from offload.optim.digest import state_digest
from offload.optim.gradient import Accumulator
from offload.optim.kernels import Kernels
from offload.optim.model_state import ParameterUpdate
from offload.optim.written import written_by_commit, written_until_commit
from offload.policy import Order, resolve_overlap
from offload.storage.spill import Spill
from offload.storage.store import BlockStore
from offload.streaming.activations import Activations, open_activations
from offload.streaming.arrangement import arrange, log_strided, log_wide
from offload.streaming.attachment import Attachment
from offload.streaming.buffers import ModelBuffers, move_buffers
from offload.streaming.building import Building
from offload.streaming.counters import ModelCounters
from offload.streaming.discovery import DiscoveredModel
from offload.streaming.edits import Edits
from offload.streaming.link_waits import LinkWaits
from offload.streaming.model_layout import require_same, require_wholeness
from offload.streaming.model_memory import ModelMemory
from offload.streaming.parameters import close_mixed
from offload.streaming.residency import Residency
from offload.streaming.step_updates import StepUpdates
from offload.streaming.torch_private import is_in_backward
from offload.streaming.wrap_options import WrapOptions
from offload.streaming.write_back import write_dirty


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
        self._edits = Edits(self._parameters, is_training=options.is_training)
        overlap = options.overlap if options.is_training else "none"
        self._updates = StepUpdates(
            order=order,
            overlap=resolve_overlap(overlap),
            is_early=overlap in ("backward", "both"),
        )
        self._updates.on_failure = self._refuse_uses
        link_waits = LinkWaits(self.device, self._updates.stalls)
        self._memory = ModelMemory(
            self._parameters,
            options=options,
            device=self.device,
            store=store,
            host_budget=host_budget,
            device_budget=device_budget,
            link_waits=link_waits,
        )
        self._attachment = Attachment(model, self._parameters, device=self.device)
        self._update_now: Callable[[nn.Parameter], ParameterUpdate | None] = lambda _: None
        self._is_accumulating = False
        self.counters = ModelCounters(
            updates=self._updates,
            attachment=self._attachment,
            store=store,
            link_waits=link_waits,
        )

    def open(self) -> None:
        """Lays the model out, moves its parameters to their tier and attaches to its modules.

        Raises:
            PlanError: The budget is too small; nothing was moved.
            StoreError: The resumed store holds another model.
        """
        stored = None if self._resume is None else self._resume.layout
        arrangement = arrange(
            self.model,
            self.options,
            prefix=self._prefix,
            stored=stored,
            keeps_records=bool(self._order.kept(1, 1, 1)),
            is_unified=self.device.is_unified,
        )
        discovered, self._planner = arrangement.discovered, arrangement.planner
        self.layout = arrangement.layout
        if stored is not None:
            self.require_layout(stored)
        self.plan, self.device_plan = arrangement.host, arrangement.device
        arrangement.require_fit(
            self.options.beside, is_process_memory=is_process_memory(self.device.kind)
        )
        log_wide(arrangement)
        log_strided(discovered)
        for unit in discovered.units:
            self._parameters.update(unit.parameters)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._take_memory()
        self._adopt()
        if self._resume is not None and self._store is not None:
            self._buffers().read(self._store, self._resume.buffers)
        move_buffers(self.model, self.device.torch_device)
        if self.options.is_streamed(is_unified=self.device.is_unified):
            self._stream(discovered)
        elif self._updates.deferred is not None:
            self._attachment.hide_pending(
                discovered,
                state=self._memory.state,
                updates=self._updates,
                on_device=self._memory.device_parameters,
            )
        if self.options.is_training and self.options.activations.is_used:
            self._activations = open_activations(
                self.model,
                discovered,
                self.options.activations,
                slots=self._memory.host.activations,
                device=self.device,
                make_spill=self._make_spill,
                stalls=self._updates.stalls,
            )
            self.counters.offloaded = self._activations
        if self._memory.gradients is not None:
            self._memory.gradients.take_existing()
        self._edits.see()
        self._attachment.note_parameters()

    def close(self) -> None:
        """Applies what is pending and detaches from the model's modules; may be called again.

        Parameters that an update left between two steps are refused for good.

        Raises:
            StorageError, CorruptStateError: The pending updates failed.
        """
        try:
            self._updates.close()
        finally:
            self._attachment.end_refusal()  # laid around the others
            if self._activations is not None:
                self._activations.close()
            self._attachment.close()
            if self._updates.failure is not None and self.residency is None:
                close_mixed(self.model, self._updates.failure)
            self._memory.close()

    # What the optimizer asks.

    def use_rule(self, rule: str, *, takes_whole: bool) -> None:
        """Lays the state out for `rule`, if it is not and there is no state yet.

        Raises:
            StoreError: There is the state of another optimizer.
            ConfigError: Matrices are laid out apart for an optimizer that does not update them,
                or are not for one that does; or the state does not fit what was planned.
        """
        require_wholeness(self.layout, takes_whole=takes_whole)
        if rule != self.layout.rule:
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
        assert self._memory.gradients is not None
        return self._memory.gradients.accumulator_of(parameter)

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
        if self._attachment.streamed is None:
            self._attachment.look_for_additions()
        started = time.perf_counter()
        self._updates.finish()
        if self._updates.early is None or not self._updates.early.has_begun:
            self._require_room_for_step()
        self._leave_slots(before_commit=False)
        if self._memory.gradients is not None:
            self._memory.gradients.settle()
        step = self.completed_steps + 1
        done = self._updates.take_early(updates)
        try:
            if self._updates.deferred is None:
                self._updates.run(updates, step=step, skip=done)
            else:
                assert self._attachment.streamed is not None
                trace = self._attachment.streamed.residency.trace
                self._updates.start(updates, step=step, trace=trace, skip=done)
                if self._memory.gradients is not None:
                    self._updates.wait_for(self._memory.gradients.aliased(updates))
            for name in updates:
                self.steps[name] = self.step_of(name) + 1
            self.completed_steps += 1
            self._increment_versions(updates)
        except BaseException as error:  # an interrupt too: what is counted is not what is done
            self._updates.fail(error)
            raise
        if self._attachment.streamed is not None:
            self._attachment.streamed.after_update()
        self.counters.update_s += time.perf_counter() - started

    # What the session asks.

    @property
    def host_peak_bytes(self) -> int:
        return self._memory.host.budget.peak_bytes

    @property
    def transfer_memory(self) -> memoryview:
        """Slots and windows: the memory that the I/O engine moves all the time; may be empty."""
        return self._memory.host.transfers

    @property
    def residency(self) -> Residency | None:
        return self._attachment.residency

    def has(self, parameter: torch.Tensor) -> bool:
        """Tells whether `parameter` is one of this model, trained or not."""
        return id(parameter) in self._names

    def require_layout(self, stored: ModelLayout) -> None:
        """Raises StoreError unless `stored` is the layout of this model."""
        assert self._store is not None
        require_same(stored, self.layout, root=self._store.root)

    def require_committable(self) -> None:
        """Raises StoreError if an update failed in its middle."""
        self._updates.require_whole("commit")

    def write_for_commit(self) -> CommitHead:
        """Writes what is resident and changed; returns what a commit says of this model."""
        self.require_committable()
        assert self._store is not None
        self._updates.finish()
        with self.counters.committing():
            self._settle_edits()
            state, window = self._memory.state, self._memory.window
            num_at_once = self.plan.num_written_at_once
            groups = written_by_commit(self.layout, state.dirty)
            self._store.require_room(groups, num_in_flight=num_at_once, what="commit")
            write_dirty(state, window, num_at_once=num_at_once)
            if state.seen is not None:
                state.seen.note_missing()
            buffers = self._buffers().write(self._store)
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
        if self.residency is not None:
            self.residency.evict_all()

    def roll_back(self, point: CommitHead) -> None:
        """Goes back to `point`, which is current in the store now; after `leave_store`."""
        self._memory.read_back()
        self.steps = dict(point.steps)
        self.completed_steps = point.step
        if self._store is not None:
            self._buffers().read(self._store, point.buffers)
        self._increment_versions(self._parameters)
        self._edits.see()
        self._updates.forget_failure()
        self._attachment.end_refusal()

    def fail(self, error: BaseException) -> None:
        """Refuses whatever uses the state until `roll_back`: `error` left it between two."""
        self._updates.fail(error)

    def state_digest(self) -> str:
        """Returns the digest of parameters and optimizer state."""
        self._updates.require_whole("digest")
        self._updates.finish()
        self._settle_edits()
        make_room = self._attachment.give_slots_back
        with self.counters.digesting():
            self._updates.pipeline.drop_prefetched()  # the digest reads through a buffer
            with self._memory.reading(make_room=make_room) as reader:
                return state_digest(
                    self.layout, reader, steps=self.steps, completed_steps=self.completed_steps
                )

    def _buffers(self) -> ModelBuffers:
        return ModelBuffers(self.model, self._prefix)

    # Steps of opening.

    def _change_rule(self, rule: str) -> None:
        """Lays the state out anew in the memory that was planned for another rule."""
        if self.completed_steps or self._is_resumed:
            raise StoreError(
                f"cannot make an optimizer with update rule `{rule}`: found the state of "
                f"`{self.layout.rule}` after {self.completed_steps} steps; make the optimizer "
                "that the run was started with, or start another store"
            )
        layout = dataclasses.replace(self.layout, rule=rule)
        self._memory.change_rule(layout, self._planner.host(layout))
        self.layout = layout
        self._use_memory()

    def _take_memory(self) -> None:
        self._memory.open(
            self.layout,
            plan=self.plan,
            device_plan=self.device_plan,
            kernels=self._kernels,
            make_spill=self._make_spill,
            before_gradient=self._before_gradient_changes,
            on_gradient=None if self._updates.early is None else self._on_gradient,
        )
        if self._memory.gradients is not None:
            self.counters.spilled = self._memory.gradients.spilled
        self._use_memory()

    def _use_memory(self) -> None:
        self._updates.use(self._memory.state, self._memory.window, self._kernels)
        self._edits.use(self._memory.state)

    def _adopt(self) -> None:
        self._memory.adopt(building=self._building, is_resumed=self._is_resumed)
        if self._building is not None:
            self._building.release(self.model)
        trim_heap()

    def _stream(self, discovered: DiscoveredModel) -> None:
        if not self.layout.parameter_bytes:  # nothing to stream
            return
        memory = self._memory
        slots = memory.host.slots if memory.on_device is None else memory.on_device.slots
        assert slots is not None
        self._attachment.stream(
            discovered,
            state=memory.state,
            updates=self._updates,
            slots=slots,
            staging=memory.host.slots,
            prefetch_distance=self.options.prefetch_distance,
            on_edit=self._edits.note_streamed,
            begin_rows=memory.gradients.begin_rows if memory.gradients else None,
            workspace_bytes=self.plan.workspace_bytes,
        )

    # Steps of updating and committing.

    def _before_gradient_changes(self, name: str) -> None:
        if self._updates.finish_before_gradient(name):
            self.counters.end_step()

    def _on_gradient(self, name: str) -> None:
        """Starts the updates for which this was the last gradient."""
        early, gradients = self._updates.early, self._memory.gradients
        if early is None or self._is_accumulating or not is_in_backward():
            return
        if gradients is None or gradients.aliased((name,)):
            return
        if not early.has_begun:
            self._require_room_for_step()
        early.arrived(
            name,
            update_of=self._update_arrived,
            edited=self._memory.state.edited,
        )

    def _update_arrived(self, name: str) -> ParameterUpdate | None:
        """Returns what a step would apply to a parameter whose gradient is in host memory."""
        assert self._memory.gradients is not None
        self._memory.gradients.settle()
        return self._update_now(self._parameters[name])

    def _increment_versions(self, names: Iterable[str]) -> None:
        """As after any in-place change: a graph that saved the old values must not be used."""
        torch.autograd.graph.increment_version([self._parameters[name] for name in names])
        self._edits.see_versions()
        self._attachment.see_versions()

    def _refuse_uses(self) -> None:
        """Has modules refuse the parameters, and graphs that saved some: values are mixed."""
        self._attachment.refuse(self._updates.require_usable)
        self._increment_versions(self._parameters)

    def _leave_slots(self, *, before_commit: bool) -> None:
        """Notes what the user edited; stored parameters leave their slots before they change."""
        if self.residency is not None:
            self.residency.evict_all()
        else:
            if self._updates.resident is not None:
                self._updates.resident.require_untouched()
            self._edits.note_resident(before_commit=before_commit)

    def _settle_edits(self) -> None:
        """Brings parameters that the user edited, and their masters, to where they are stored."""
        if self.residency is not None:
            self.residency.settle_edits()
        else:
            self._leave_slots(before_commit=True)
            self._edits.see_versions()
        if self._memory.state.edited:
            self._updates.run({}, step=self.completed_steps + 1)

    def _require_room_for_step(self) -> None:
        if self._store is None:
            return
        commits = self._store.durability == "commit"
        groups = written_until_commit(self._memory.state, commits=commits)
        # A staged version lies beside the current one until the step.
        is_staged = self._updates.early is not None
        self._store.require_room(
            groups,
            num_in_flight=len(groups) if is_staged else self.plan.num_written_at_once,
            what=f"make step {self.completed_steps + 1}",
        )
