"""Measures the update phase alone: state on storage, parameters and gradients in memory."""

import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offload.bench.update_baselines import RULES, BaselineUpdates
from offload.bench.update_engine import EngineUpdates
from offload.bench.update_options import (
    DEFAULT_ORDER,
    DEFAULT_STRIPING,
    PathBytes,
    UpdateOptions,
    Updates,
    check_options,
    made_up_layout,
)
from offload.bench.update_room import check_room, host_plan
from offload.optim.kernels import load_kernels
from offload.plan.bound import Bound, ComputeTimes, step_bound
from offload.plan.machine import Machine
from offload.plan.observed import raised_to_steps
from offload.plan.spilling import SpilledBytes
from offload.plan.traffic import (
    ModelBytes,
    StepTraffic,
    cached_state_bytes,
    is_in_turns,
    step_traffic,
)
from offload.runs.busy import CpuTime, others_cpu_share
from offload.runs.probe import ProbeSize, probe_machine
from offload.runs.result import ratio, typical_bytes
from offload.sizes import MIB
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings

_LOG = logging.getLogger("offload.bench")
_NUM_WARM_UP_STEPS = 2
"""The first writes state that was zero, the second places it by what the paths deliver."""
_DIRECTORY = "offload-bench-update"


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

    baseline: str
    update_s: float
    step_s: float
    read_bytes_per_step: int
    write_bytes_per_step: int
    formula_read_bytes_per_step: int
    formula_write_bytes_per_step: int
    cache_hit_rate: float
    bound_s: float
    achieved_over_bound: float | None
    path_rate_factor: float | None
    """How much faster than probed the paths were, so that steps do not beat their bound."""
    update_bound_s: float
    update_achieved_over_bound: float | None
    """As `parameters_per_s`."""
    parameters_per_s: float | None
    """None where updates run under passes: their exposed part says nothing of their rate."""
    paths: list[PathBytes]
    state_digest: str
    commit_s: float | None
    """Median; None without commits."""
    steps: list[UpdateStep]
    others_cpu_share: float | None = None
    """The part of the cores' time that other processes took during the steps; None: not known."""

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
        PlanError: The host memory is too small, and the message names the smallest; or storage.
    """
    check_options(options)
    _warn_of_ignored(options)
    if options.baseline == "deepspeed-like":
        options = replace(options, paths=options.paths[:1])
    check_room(options)
    roots = [path / f"{_DIRECTORY}-{os.getpid()}" for path in options.paths]
    try:
        return _Bench(options, roots).run(on_step)
    finally:
        for root in roots:
            shutil.rmtree(root, ignore_errors=True)


def _warn_of_ignored(options: UpdateOptions) -> None:
    """Says which options a baseline does not follow."""
    rules = RULES.get(options.baseline)
    if rules is None:
        return
    ignored = {
        "--order": (options.order, DEFAULT_ORDER, rules.order),
        "--striping": (options.striping, DEFAULT_STRIPING, f"turns of {rules.turns}"),
    }
    for name, (given, default, own) in ignored.items():
        if given not in (default, own):
            _LOG.warning(
                "`%s` %s has no effect with `--baseline` %s, which has its own: %s",
                *(name, given, options.baseline, own),
            )


class _Bench:
    """One measurement."""

    def __init__(self, options: UpdateOptions, roots: Sequence[Path]) -> None:
        self._options = options
        self._roots = roots
        self._is_engine = options.baseline == "engine"
        codec = options.codec if self._is_engine else "fp32"
        self._layout = made_up_layout(options.parameters, codec=codec)
        self._plan = host_plan(options)

    def run(self, on_step: Callable[[int, UpdateStep], None] | None) -> UpdateReport:
        options = self._options
        before = self._probe()
        with ExitStack() as stack:
            updates: EngineUpdates | BaselineUpdates
            if self._is_engine:
                updates = stack.enter_context(
                    EngineUpdates(
                        self._layout, self._plan, options, roots=self._roots, machine=before
                    )
                )
                num_cached = self._plan.num_cached
            else:
                updates = stack.enter_context(
                    BaselineUpdates(self._layout, self._plan, options, roots=self._roots)
                )
                num_cached = updates.num_cached
            for number in range(1, _NUM_WARM_UP_STEPS + 1):
                self._step(updates, number, on_step)
            start, hits, cpu_time = updates.moved(), updates.hit_bytes, CpuTime.now()
            numbers = range(_NUM_WARM_UP_STEPS + 1, _NUM_WARM_UP_STEPS + options.steps + 1)
            measured = [self._step(updates, number, on_step) for number in numbers]
            others_share = others_cpu_share(cpu_time, CpuTime.now())
            moved = [_since(a, b) for a, b in zip(start, updates.moved(), strict=True)]
            hits = updates.hit_bytes - hits
            digest = updates.digest()
            commit_s = updates.commit_s if isinstance(updates, EngineUpdates) else []
        machine = before.best_of(self._probe())
        traffic = self._traffic(num_cached, numbers)
        total = options.steps * sum(record.padded_bytes for record in self._layout.records)
        report = self._report(measured, machine, traffic, moved, digest, commit_s, hits / total)
        return replace(report, others_cpu_share=others_share)

    def _step(
        self,
        updates: Updates,
        number: int,
        on_step: Callable[[int, UpdateStep], None] | None,
    ) -> UpdateStep:
        before, started_s = _total(updates.moved()), time.perf_counter()
        exposed_s = 0.0
        if isinstance(updates, EngineUpdates):
            exposed_s = updates.passes(number, self._options.compute_s)
        else:
            time.sleep(self._options.compute_s)
        updates.before_update()
        update_s = updates.update(number) + exposed_s
        step_s = time.perf_counter() - started_s
        after = _total(updates.moved())
        step = UpdateStep(
            step_s=step_s,
            update_s=update_s,
            read_bytes=after[0] - before[0],
            write_bytes=after[1] - before[1],
        )
        if isinstance(updates, EngineUpdates):
            updates.commit_if_due(number)
        if on_step is not None:
            on_step(number, step)
        return step

    @property
    def _order(self) -> str:
        rules = RULES.get(self._options.baseline)
        return rules.order if rules else self._options.order

    def _traffic(self, num_cached: int, steps: Sequence[int]) -> StepTraffic:
        """Returns the bytes of one of `steps` by the rules of what is measured."""
        rules = RULES.get(self._options.baseline)
        spilled_bytes = 4 * self._options.parameters if rules and rules.spills_gradients else 0
        return step_traffic(
            ModelBytes.of(self._layout),
            parameters="host",
            optimizer="storage",
            micro_steps=1,
            cached_state_bytes=cached_state_bytes(
                self._layout, self._order, num_cached, steps=steps
            ),
            spilled=SpilledBytes.each_once(spilled_bytes, 1),
        )

    def _probe(self) -> Machine:
        options = self._options
        if options.machine is not None:
            return _first_paths(options.machine, len(options.paths))
        settings = [each for path in options.paths for each in measured_settings(path)]
        with Engine(paths=settings) as engine:
            return probe_machine(
                options.paths,
                engine=engine,
                kernels=load_kernels(),
                codec=self._layout.codec,
                dtype="bfloat16",
                size=ProbeSize.within(
                    host_bytes=options.host_memory_bytes, storage_bytes=512 * MIB
                ),
            )

    def _bound(self, machine: Machine, traffic: StepTraffic) -> Bound:
        compute_s = self._options.compute_s
        return step_bound(
            machine,
            traffic,
            num_parameters=self._layout.trainable_elements,
            compute=[ComputeTimes(forward_s=compute_s / 3, backward_s=2 * compute_s / 3)],
            overlap=self._options.overlap,
            prefetched_bytes=self._plan.prefetched_bytes,
            shares_cores=False,  # they sleep
        )

    def _report(
        self,
        steps: list[UpdateStep],
        machine: Machine,
        traffic: StepTraffic,
        moved: list[PathBytes],
        digest: str,
        commit_s: list[float],
        hit_rate: float,
    ) -> UpdateReport:
        update_s = statistics.median(step.update_s for step in steps)
        step_s = statistics.median(step.step_s for step in steps)
        factor = None
        if self._options.machine is None:  # rates that are given are not for us to judge
            machine, factor = raised_to_steps(
                machine,
                [step.step_s for step in steps],
                lambda rates: [self._bound(rates, traffic).step_s] * len(steps),
            )
        bound, in_turns = self._bound(machine, traffic), is_in_turns(self._order)
        read_bytes = typical_bytes([s.read_bytes for s in steps], in_turns=in_turns)
        write_bytes = typical_bytes([s.write_bytes for s in steps], in_turns=in_turns)
        assert read_bytes is not None and write_bytes is not None
        return UpdateReport(
            baseline=self._options.baseline,
            update_s=update_s,
            step_s=step_s,
            read_bytes_per_step=read_bytes,
            write_bytes_per_step=write_bytes,
            formula_read_bytes_per_step=traffic.read_bytes,
            formula_write_bytes_per_step=traffic.write_bytes,
            cache_hit_rate=hit_rate,
            bound_s=bound.step_s,
            achieved_over_bound=ratio(bound.step_s, step_s),
            path_rate_factor=factor,
            update_bound_s=bound.update_s,
            update_achieved_over_bound=(
                ratio(bound.update_s, update_s) if self._options.overlap == "none" else None
            ),
            parameters_per_s=(
                self._options.parameters / update_s if self._options.overlap == "none" else None
            ),
            paths=moved,
            state_digest=digest,
            commit_s=statistics.median(commit_s) if commit_s else None,
            steps=steps,
        )


def _first_paths(machine: Machine, count: int) -> Machine:
    return replace(machine, paths=machine.paths[:count])


def _total(moved: Sequence[PathBytes]) -> tuple[int, int]:
    return sum(each.read_bytes for each in moved), sum(each.write_bytes for each in moved)


def _since(start: PathBytes, now: PathBytes) -> PathBytes:
    return PathBytes(
        path=now.path,
        read_bytes=now.read_bytes - start.read_bytes,
        write_bytes=now.write_bytes - start.write_bytes,
    )
