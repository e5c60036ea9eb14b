"""Measures the update phase alone: state on storage, parameters and gradients in memory."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import ConfigError
from offload.layout import ModelLayout, ParameterFacts, UnitFacts, build_layout
from offload.optim.digest import state_digest
from offload.optim.kernels import load_kernels
from offload.optim.pipeline import ModelState, ParameterUpdate, UpdatePipeline, state_key
from offload.optim.readers import StateParts
from offload.optim.scalars import adamw_scalars
from offload.optim.window import Window
from offload.plan.bound import update_bound_s
from offload.plan.host import plan_host
from offload.plan.machine import Machine
from offload.plan.traffic import ModelBytes, StepTraffic, step_traffic
from offload.policy import resolve_order, resolve_striping
from offload.runs.probe import ProbeSize, probe_machine
from offload.runs.result import ratio
from offload.sizes import MIB
from offload.storage.engine import Engine
from offload.storage.store import BlockStore
from offload.storage.store_paths import StorePath
from offload.streaming.host_memory import HostMemory

_PARAMETER_ELEMENTS = 16 << 20
"""Of one made-up parameter, as large as a weight of a model of some billion parameters."""
_NUM_WARM_UP_STEPS = 2
"""The first writes state that was zero, the second places it by what the paths deliver."""
_DIRECTORY = "offload-bench-update"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """What is measured."""

    parameters: int
    paths: Sequence[Path]
    host_memory_bytes: int
    """Of parameters and gradients (4 bytes for each parameter), window and cache."""
    codec: str = "split"
    order: str = "sequential"
    striping: str = "adaptive"
    compute_s: float = 0.0
    """Stands for forward and backward: a third before, two thirds after the loss, sleeping."""
    steps: int = 5
    """Measured, after two that are not."""
    commit_every: int = 0
    """Steps between commits; 0: none."""
    machine: Machine | None = None
    """Rates that are known already; None: they are measured before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBytes:
    """What one path moved in the measured steps."""

    path: str
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStep:
    """One measured step."""

    step_s: float
    update_s: float
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What was measured; times are medians over the measured steps."""

    update_s: float
    step_s: float
    read_bytes_per_step: int
    write_bytes_per_step: int
    formula_read_bytes_per_step: int
    formula_write_bytes_per_step: int
    cache_hit_rate: float
    bound_s: float
    achieved_over_bound: float | None
    update_bound_s: float
    update_achieved_over_bound: float | None
    parameters_per_s: float
    paths: list[PathBytes]
    state_digest: str
    commit_s: float | None
    """Median; None without commits."""
    steps: list[UpdateStep]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_update(
    options: UpdateOptions, *, on_step: Callable[[int, UpdateStep], None] | None = None
) -> UpdateReport:
    """Returns how long updates take, and what the paths moved. Leaves nothing on the paths.

    Args:
        options: What to measure.
        on_step: Called after each step, warm-up included, with its number from 1.

    Raises:
        ConfigError: An option is wrong.
        PlanError: The host memory is too small; the message names the smallest.
    """
    _check(options)
    roots = [path / f"{_DIRECTORY}-{os.getpid()}" for path in options.paths]
    try:
        return _Bench(options, roots).run(on_step)
    finally:
        for root in roots:
            shutil.rmtree(root, ignore_errors=True)


class _Bench:
    """One measurement, with its store open for as long as it runs."""

    def __init__(self, options: UpdateOptions, roots: list[Path]) -> None:
        self._options = options
        self._roots = roots
        self._layout = made_up_layout(options.parameters, codec=options.codec)
        self._order = resolve_order(options.order)
        self._plan = plan_host(
            self._layout,
            budget_bytes=options.host_memory_bytes,
            parameters="host",
            optimizer="storage",
            keeps_records=bool(self._order.kept(1, 1, step=1)),
        )
        records = self._layout.records
        kept = self._order.kept(len(records), self._plan.num_cached, step=1)
        self._traffic = step_traffic(
            ModelBytes.of(self._layout),
            parameters="host",
            optimizer="storage",
            micro_steps=1,
            cached_state_bytes=sum(records[index].num_bytes for index in kept),
        )

    def run(self, on_step: Callable[[int, UpdateStep], None] | None) -> UpdateReport:
        options = self._options
        self._plan.require_fit()
        memory = HostMemory(self._plan)
        before = self._probe()
        with ExitStack() as stack:
            engines = [stack.enter_context(Engine()) for _ in self._roots]
            for engine in engines:
                engine.register(memory.transfers)
            store = BlockStore(
                [
                    StorePath(root=root, nominal_bytes_per_s=rates.mixed_bytes_per_s)
                    for root, rates in zip(self._roots, before.paths, strict=True)
                ],
                engine=engines,
                durability="commit" if options.commit_every else "none",
                striping=resolve_striping(options.striping),
            )
            store.create()
            stack.callback(store.close)
            updates = _Updates(
                self._layout, memory, store, options, num_cached=self._plan.num_cached
            )
            measured = [
                self._step(updates, store, number, on_step)
                for number in range(1, _NUM_WARM_UP_STEPS + options.steps + 1)
            ][_NUM_WARM_UP_STEPS:]
            digest = updates.digest()
            moved, hit_rate = updates.moved(), updates.cache_hit_rate
        machine = before.best_of(self._probe())
        return self._report(measured, machine, moved, digest, updates.commit_s, hit_rate)

    def _step(
        self,
        updates: "_Updates",
        store: BlockStore,
        number: int,
        on_step: Callable[[int, UpdateStep], None] | None,
    ) -> UpdateStep:
        if number == _NUM_WARM_UP_STEPS + 1:
            updates.start_counting()
        before, started_s = store.stats(), time.perf_counter()
        time.sleep(self._options.compute_s)
        update_s = updates.update(number)
        step = UpdateStep(
            step_s=time.perf_counter() - started_s,
            update_s=update_s,
            read_bytes=store.stats().read_bytes - before.read_bytes,
            write_bytes=store.stats().write_bytes - before.write_bytes,
        )
        updates.commit_if_due(number)
        if on_step is not None:
            on_step(number, step)
        return step

    def _probe(self) -> Machine:
        options = self._options
        if options.machine is not None:
            return options.machine
        with Engine() as engine:
            return probe_machine(
                options.paths,
                engine=engine,
                kernels=load_kernels(),
                codec=options.codec,
                dtype="bfloat16",
                size=ProbeSize.within(
                    host_bytes=options.host_memory_bytes, storage_bytes=512 * MIB
                ),
            )

    def _report(
        self,
        steps: list[UpdateStep],
        machine: Machine,
        moved: list[PathBytes],
        digest: str,
        commit_s: list[float],
        hit_rate: float,
    ) -> UpdateReport:
        update_s = statistics.median(step.update_s for step in steps)
        step_s = statistics.median(step.step_s for step in steps)
        bound_s = _bound_s(machine, self._traffic, num_parameters=self._layout.trainable_elements)
        step_bound_s = bound_s + self._options.compute_s
        return UpdateReport(
            update_s=update_s,
            step_s=step_s,
            read_bytes_per_step=round(statistics.median(step.read_bytes for step in steps)),
            write_bytes_per_step=round(statistics.median(step.write_bytes for step in steps)),
            formula_read_bytes_per_step=self._traffic.read_bytes,
            formula_write_bytes_per_step=self._traffic.write_bytes,
            cache_hit_rate=hit_rate,
            bound_s=step_bound_s,
            achieved_over_bound=ratio(step_bound_s, step_s),
            update_bound_s=bound_s,
            update_achieved_over_bound=ratio(bound_s, update_s),
            parameters_per_s=self._options.parameters / update_s,
            paths=moved,
            state_digest=digest,
            commit_s=statistics.median(commit_s) if commit_s else None,
            steps=steps,
        )


class _Updates:
    """The update pipeline of a made-up model."""

    def __init__(
        self,
        layout: ModelLayout,
        memory: HostMemory,
        store: BlockStore,
        options: UpdateOptions,
        *,
        num_cached: int,
    ) -> None:
        self._layout = layout
        self._store = store
        self._memory = memory
        self._options = options
        self._order = resolve_order(options.order)
        self.commit_s: list[float] = []
        self._completed = 0
        parameters = memory.flat_parameters(layout)
        gradients = _gradients(layout, memory)
        generator = torch.Generator().manual_seed(0)
        for tensor in (*parameters.values(), *gradients.values()):
            tensor.normal_(generator=generator)
        self._state = ModelState(
            layout=layout, store=store, parameters=parameters, records=None, gradients=gradients
        )
        self._window = Window(
            layout, states=memory.states, parameters=memory.parameters, num_cached=num_cached
        )
        self._pipeline = UpdatePipeline(self._state, self._window, load_kernels())
        self._hits_before = 0
        self._start = [(0, 0) for _ in options.paths]

    def update(self, step: int) -> float:
        """Runs the update of a step and returns its time."""
        scalars = adamw_scalars(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step)
        updates = {
            name: ParameterUpdate(scalars=scalars, scales=()) for name in self._layout.parameters
        }
        records = self._layout.records
        order = [records[index] for index in self._order.sequence(len(records), step)]
        kept = self._order.kept(len(records), self._window.num_cached, step)
        started_s = time.perf_counter()
        self._pipeline.run(order, updates, kept={records[index].name for index in kept})
        self._completed = step
        return time.perf_counter() - started_s

    def commit_if_due(self, step: int) -> None:
        """Commits the state on storage; parameters stay in memory."""
        every = self._options.commit_every
        if every and step % every == 0:
            started_s = time.perf_counter()
            self._write_cached()
            self._store.commit({"bench": step})
            self.commit_s.append(time.perf_counter() - started_s)

    @property
    def cache_hit_rate(self) -> float:
        """Bytes of records found in memory, of all that the measured steps updated."""
        steps = self._completed - _NUM_WARM_UP_STEPS
        total = steps * sum(record.padded_bytes for record in self._layout.records)
        return (self._pipeline.cache_hit_bytes - self._hits_before) / total if total else 0.0

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

    def start_counting(self) -> None:
        """Says that the measured steps begin."""
        self._hits_before = self._pipeline.cache_hit_bytes
        self._start = [(p.read_bytes, p.write_bytes) for p in self._store.stats().paths]

    def moved(self) -> list[PathBytes]:
        """Returns what each path moved since."""
        return [
            PathBytes(path=str(path), read_bytes=p.read_bytes - r, write_bytes=p.write_bytes - w)
            for path, p, (r, w) in zip(
                self._options.paths, self._store.stats().paths, self._start, strict=True
            )
        ]

    def digest(self) -> str:
        """Returns the digest of the state; what it reads counts for nothing."""
        counted = self.moved()
        cached = {
            record.name: state
            for record in self._layout.records
            if (state := self._window.cached_state(record)) is not None
        }
        with self._memory.lend_scratch(0, make_room=lambda: None) as scratch:
            reader = StateParts(
                store=self._store,
                scratch=scratch,
                parameters=self._state.parameters,
                records=None,
                cached=cached,
            )
            digest = state_digest(
                self._layout,
                reader,
                steps=dict.fromkeys(self._layout.parameters, self._completed),
                completed_steps=self._completed,
            )
        self._start = [
            (stats.read_bytes - path.read_bytes, stats.write_bytes - path.write_bytes)
            for path, stats in zip(counted, self._store.stats().paths, strict=True)
        ]
        return digest


def made_up_layout(num_parameters: int, *, codec: str) -> ModelLayout:
    """Returns the layout of a model of bf16 parameters, cut into weights of equal size."""
    units = []
    for index, first in enumerate(range(0, num_parameters, _PARAMETER_ELEMENTS)):
        size = min(_PARAMETER_ELEMENTS, num_parameters - first)
        facts = ParameterFacts(name=f"layers.{index:05d}.weight", shape=(size,), dtype="bfloat16")
        units.append(UnitFacts(name=f"layers.{index:05d}", parameters=(facts,)))
    return build_layout(units, codec=codec)


def _gradients(layout: ModelLayout, memory: HostMemory) -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    offset = 0
    for shard in layout.shards.values():
        num_bytes = shard.padded_bytes
        part = torch.frombuffer(memory.gradients[offset : offset + num_bytes], dtype=torch.bfloat16)
        flat[shard.name] = part
        offset += num_bytes
    return flat


def _bound_s(machine: Machine, traffic: StepTraffic, *, num_parameters: int) -> float:
    return update_bound_s(machine, traffic, num_parameters=num_parameters)


def _check(options: UpdateOptions) -> None:
    if not options.paths:
        raise ConfigError(
            "cannot measure updates: expected at least one `--path`, found none; name a directory"
        )
    for path in options.paths:
        if not path.is_dir():
            raise ConfigError(
                f"cannot measure updates on `{path}`: expected a directory, found "
                f"{'a file' if path.exists() else 'nothing'}; make it or correct `--path`"
            )
    for name in ("parameters", "steps"):
        if getattr(options, name) < 1:
            raise ConfigError(
                f"cannot measure updates with `--{name}` {getattr(options, name)}: expected 1 or "
                "more; change it"
            )
    if options.codec not in ("split", "fp32"):
        raise ConfigError(
            f"cannot measure updates with `--codec` {options.codec}: expected `split` or `fp32`; "
            "change it"
        )
    resolve_order(options.order)
    resolve_striping(options.striping)
