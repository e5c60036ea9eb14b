"""The engine's own update pipeline on a made-up model."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from offload.bench.update_io import engines_of
from offload.bench.update_options import PathBytes, UpdateOptions, made_up_values
from offload.layout import ModelLayout
from offload.optim.deferred import DeferredUpdates
from offload.optim.digest import state_digest
from offload.optim.early import EarlyUpdates
from offload.optim.kernels import load_kernels
from offload.optim.pipeline import ModelState, ParameterUpdate, UpdatePipeline, state_key
from offload.optim.readers import StateParts
from offload.optim.scalars import adamw_scalars
from offload.optim.window import Window
from offload.plan.host import HostPlan
from offload.plan.machine import Machine
from offload.policy import resolve_order, resolve_overlap, resolve_striping
from offload.storage.stalls import StallAccount
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath
from offload.streaming.host_memory import HostMemory


class EngineUpdates:
    """The update pipeline over a store that lasts as long as the context."""

    def __init__(
        self,
        layout: ModelLayout,
        plan: HostPlan,
        options: UpdateOptions,
        *,
        roots: Sequence[Path],
        machine: Machine,
    ) -> None:
        """Stores its arguments.

        Args:
            layout: Of the made-up model.
            plan: How the host memory is cut.
            options: What is measured.
            roots: Directories of the store, one on each path.
            machine: Rates that the striping begins with.
        """
        self._layout = layout
        self._plan = plan
        self._options = options
        self._roots = roots
        self._machine = machine
        self._order = resolve_order(options.order)
        self._stack = ExitStack()
        self._completed = 0
        # Read and written on each path by digests and commits.
        self._beside_steps = [(0, 0) for _ in roots]
        self.commit_s: list[float] = []
        overlap = resolve_overlap(options.overlap)
        self._deferred = DeferredUpdates(overlap, StallAccount()) if overlap else None
        self._early = (
            EarlyUpdates(StallAccount()) if options.overlap in ("backward", "both") else None
        )
        # Of whole steps, as of when no update was pending last; None: updates run at once.
        self._moved_by_steps: list[PathBytes] | None = None
        self._hit_bytes_by_steps: int | None = None

    def __enter__(self) -> Self:
        with self._stack:
            engines = [self._stack.enter_context(each) for each in engines_of(self._options)]
            paths = [
                StorePath(root=root, nominal_bytes_per_s=rates.mixed_bytes_per_s)
                for root, rates in zip(self._roots, self._machine.paths, strict=True)
            ]
            self._store = BlockStore(
                paths,
                engine=engines,
                durability="commit" if self._options.commit_every else "none",
                striping=resolve_striping(self._options.striping),
            )
            self._store.create()
            self._stack.callback(self._store.close)
            self._memory = HostMemory(self._plan)
            for engine in engines:
                engine.register(self._memory.transfers)
            parameters, gradients = made_up_values(self._layout, self._memory)
            self._state = ModelState(
                layout=self._layout,
                store=self._store,
                parameters=parameters,
                records=None,
                gradients=gradients,
            )
            self._window = Window(
                self._layout,
                states=self._memory.states,
                parameters=self._memory.parameters,
                num_cached=self._plan.num_cached,
                num_places=self._plan.num_places,
            )
            self._pipeline = UpdatePipeline(self._state, self._window, load_kernels())
            if self._deferred is not None:
                self._deferred.use(self._layout, self._pipeline)
                self._stack.callback(self._deferred.close)
            if self._early is not None:
                self._early.use(self._pipeline, kept=self._kept(step=1))
                self._stack.callback(self._early.close)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def passes(self, step: int, compute_s: float) -> float:
        """Sleeps as long as forward and backward take; returns what of updates was exposed.

        Args:
            step: The one that they belong to.
            compute_s: Of both: a third is forward's.
        """
        units = range(len(self._layout.units))
        waited_s = 0.0 if self._deferred is None else self._deferred.waits.wait_s
        for unit in units:
            if self._deferred is not None:
                self._deferred.wait_for(unit)
            time.sleep(compute_s / 3 / len(units))
        if self._deferred is not None:
            self._deferred.finish()
            waited_s = self._deferred.waits.wait_s - waited_s
            self._moved_by_steps = self._moved()
            self._hit_bytes_by_steps = self._pipeline.cache_hit_bytes
        if self._early is not None:
            self._arrive(step, pause_s=2 * compute_s / 3 / len(units))
            return waited_s
        if self._deferred is not None and self._completed:
            self._deferred.prefetch()
        time.sleep(2 * compute_s / 3)
        return waited_s

    def _arrive(self, step: int, *, pause_s: float) -> None:
        """Has the gradients of one unit after the other appear, each after a pause."""
        assert self._early is not None
        updates = self._updates(step)
        for unit in reversed(self._layout.units):
            time.sleep(pause_s)
            for parameter in unit.parameters():
                name = parameter.facts.name
                self._early.arrived(name, update_of=updates.get, edited=())

    def before_update(self) -> None:
        """Does nothing: gradients stay in memory."""

    def update(self, step: int) -> float:
        """Runs the update of a step, or starts it under the next passes, and returns the time."""
        updates, kept = self._updates(step), self._kept(step)
        records = self._layout.records
        order = [records[index] for index in self._order.sequence(len(records), step)]
        started_s = time.perf_counter()
        # What is resident was written in place: nobody computes with it here, and a step follows.
        done = frozenset[str]() if self._early is None else self._early.take(updates, edited=())
        if self._deferred is None:
            rest = [record for record in order if record.name not in done]
            self._pipeline.run(rest, updates, kept=kept)
        else:
            self._deferred.start(
                updates,
                edited=frozenset(),
                kept=kept,
                upcoming=range(len(self._layout.units)),
                skip=done,
            )
        self._completed = step
        return time.perf_counter() - started_s

    def _updates(self, step: int) -> dict[str, ParameterUpdate]:
        scalars = adamw_scalars(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step)
        update = ParameterUpdate(scalars=scalars, scales=())
        return dict.fromkeys(self._layout.parameters, update)

    def _kept(self, step: int) -> set[str]:
        """Returns the names of the records that a step leaves in memory."""
        records = self._layout.records
        kept = self._order.kept(len(records), self._window.num_cached, step)
        return {records[index].name for index in kept}

    def commit_if_due(self, step: int) -> None:
        """Commits the state on storage; parameters stay in memory."""
        every = self._options.commit_every
        if every and step % every == 0:
            started_s = time.perf_counter()
            self.finish()
            with self._beside():
                self._write_cached()
                self._store.commit({"bench": step})
            self.commit_s.append(time.perf_counter() - started_s)

    @property
    def hit_bytes(self) -> int:
        """Bytes of records that were found in memory so far, or until no update was pending."""
        by_steps = self._hit_bytes_by_steps
        return self._pipeline.cache_hit_bytes if by_steps is None else by_steps

    def finish(self) -> None:
        """Waits until no update is pending."""
        if self._deferred is not None:
            self._deferred.finish()

    def moved(self) -> list[PathBytes]:
        """Returns what each path moved so far, or until no update was pending last."""
        return self._moved() if self._moved_by_steps is None else self._moved_by_steps

    def _moved(self) -> list[PathBytes]:
        """Without what digests and commits moved."""
        return [
            PathBytes(
                path=str(path),
                read_bytes=moved.read_bytes - read,
                write_bytes=moved.write_bytes - written,
            )
            for path, moved, (read, written) in zip(
                self._options.paths, self._store.stats().paths, self._beside_steps, strict=True
            )
        ]

    def digest(self) -> str:
        """Returns the digest of the state; what it reads counts for nothing."""
        self.finish()
        self._pipeline.drop_prefetched()
        cached = {
            record.name: state
            for record in self._layout.records
            if (state := self._window.cached_state(record)) is not None
        }
        with self._beside(), self._memory.lend_scratch(0, make_room=lambda: None) as scratch:
            reader = StateParts(
                store=self._store,
                scratch=scratch,
                parameters=self._state.parameters,
                records=None,
                cached=cached,
            )
            return state_digest(
                self._layout,
                reader,
                steps=dict.fromkeys(self._layout.parameters, self._completed),
                completed_steps=self._completed,
            )

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Has what is moved in this context count for no step."""
        counted = self._moved()
        yield
        self._beside_steps = [
            (stats.read_bytes - path.read_bytes, stats.write_bytes - path.write_bytes)
            for path, stats in zip(counted, self._store.stats().paths, strict=True)
        ]

    def _write_cached(self) -> None:
        tickets = [
            self._store.write(state_key(record), state, num_bytes=record.num_bytes)
            for record in self._layout.records
            if (state := self._window.cached_state(record)) is not None
            and state_key(record) in self._state.dirty
        ]
        for ticket in tickets:
            ticket.wait()
        self._state.dirty.clear()
