"""What each system moves in a step, and how: the engine, and two baselines beside it.

The baselines are ours, after what their papers describe; nothing of theirs runs here.
`deepspeed-like`: fp32 master and moments in and out (12 bytes per parameter each way), gradients in
fp32 written during backward and read back by the update (4 more each way); in layout order, on the
first path, one read and one write in flight for each process. `mlp-like`: 12 bytes each way, bf16
gradients stay in memory, subgroups in turns 2 : 1 over two paths, the order alternates and the end
of one step is cached for the next; one subgroup is read ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.config.scenario import SUBGROUP_PARAMETERS, ScenarioMachine, ScenarioRun
from offload.layout import ModelLayout, ParameterFacts, UnitFacts, build_layout
from offload.layout.model import RECORD_ELEMENTS
from offload.plan.handover import handed_over, records_under_forward
from offload.plan.host import HostPlan, Placement
from offload.plan.host_cut import plan_host
from offload.plan.link import LinkTraffic, link_traffic
from offload.plan.simulated_update import WindowSize, window_of
from offload.plan.simulation import SimulatedPolicy
from offload.plan.traffic import bytes_of_units, kept_for_backward
from offload.plan.window import WINDOW_BYTES, cut_window, cut_window_beside_cache
from offload.plan.work import PassTimes, StepWork, work_of
from offload.policy import resolve_order, resolve_overlap, resolve_striping
from offload.sizes import MIB, round_up

_MOST_RECORDS = 1024
"""Of a simulated model: larger ones have larger records instead, which only lengthens the ramps."""
_BLOCKS_OF_A_RECORD = 12
_STATE_BYTES = 12
"""Of fp32 master and moments, per parameter."""
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRun:
    """A run as the simulation takes it, and what it holds in memory."""

    layout: ModelLayout
    work: StepWork
    make_policy: Callable[[], SimulatedPolicy]
    """Gives new policy objects: a striping remembers what it decided."""
    host: HostPlan
    """How the engine cuts a node's memory; of a baseline what it needs in the same way."""
    policy: dict[str, str]
    """For the reader."""
    cached_bytes: int
    num_versions: int = 1
    """Of a state on storage: a committed one and the current one, or one that is overwritten."""
    link: LinkTraffic | None = None
    """Over the links to all devices of a node; None where nothing is counted."""


def system_run(run: ScenarioRun, machine: ScenarioMachine) -> SystemRun:
    """Returns what `run` does in a step on one node of `machine`, also where it does not fit."""
    return _engine_run(run, machine) if run.system == "engine" else _baseline_run(run, machine)


def _engine_run(run: ScenarioRun, machine: ScenarioMachine) -> SystemRun:
    choices = run.policy
    layout = _layout(run, codec=choices.codec, record_elements=_engine_record_elements(run))
    parameters: Placement = "storage" if choices.parameters == "storage" else "host"
    host = _host_plan(run, layout, parameters)
    records = records_under_forward(layout, choices.order, choices.overlap, host.num_cached)
    kept = kept_for_backward(layout, host.num_slots)
    link = _link(run, layout, machine, kept=kept)
    work = work_of(
        layout,
        parameters="device" if choices.parameters == "device" else parameters,
        optimizer="storage",
        passes=_passes(layout, run, machine),
        micro_steps=run.micro_steps,
        link=link,
        handed_over=handed_over(layout, host.num_slots, records=records),
        kept=kept,
    )
    record_bytes = max(record.state_bytes for record in work.records)

    def make_policy() -> SimulatedPolicy:
        return SimulatedPolicy(
            order=resolve_order(choices.order),
            striping=resolve_striping(choices.striping),
            window=window_of(host),
            overlap=resolve_overlap("forward") if choices.overlap in ("forward", "both") else None,
            updates_in_backward=choices.overlap in ("backward", "both"),
            num_slots=host.num_slots or len(layout.units),
            prefetch_distance=choices.prefetch,
            block_bytes=_block_bytes(record_bytes),
        )

    return SystemRun(
        layout=layout,
        work=work,
        make_policy=make_policy,
        host=host,
        policy={key: str(value) for key, value in choices.model_dump().items()},
        cached_bytes=host.num_cached * record_bytes,
        num_versions=2,
        link=link,
    )


def _link(
    run: ScenarioRun, layout: ModelLayout, machine: ScenarioMachine, *, kept: frozenset[str]
) -> LinkTraffic | None:
    """Returns what goes over the links to all devices; None where there are none."""
    if not machine.gpus or machine.link_bytes_per_s is None:
        return None
    return link_traffic(
        layout,
        parameters=run.policy.parameters,
        gradient_dtype="parameter",
        micro_steps=run.micro_steps,
        kept_backward_bytes=bytes_of_units(layout, kept),
    )


def _baseline_run(run: ScenarioRun, machine: ScenarioMachine) -> SystemRun:
    is_deepspeed = run.system == "deepspeed-like"
    elements = round(run.subgroup_parameters or SUBGROUP_PARAMETERS)
    layout = _layout(run, codec="fp32", record_elements=elements)
    work = work_of(
        layout,
        parameters="host",
        optimizer="storage",
        passes=_passes(layout, run, machine),
        micro_steps=run.micro_steps,
    )
    spilled = _FP32_BYTES if is_deepspeed else 0
    work = replace(
        work,
        records=tuple(
            replace(
                record,
                state_bytes=_STATE_BYTES * record.num_parameters,
                spilled_bytes=spilled * record.num_parameters,
            )
            for record in work.records
        ),
    )
    processes = max(machine.gpus, 1)
    host = _host_plan(run, layout, "host")
    cached = 0 if is_deepspeed else host.num_cached
    record_bytes = max(record.state_bytes for record in work.records)
    order = _order_of(run)
    has_two_paths = len(run.paths or machine.paths) == 2
    striping = "modulo:2:1" if has_two_paths and not is_deepspeed else "single"

    def make_policy() -> SimulatedPolicy:
        return SimulatedPolicy(
            order=resolve_order(order),
            striping=resolve_striping(striping),
            # Of each process one is read, one updated, one written.
            window=WindowSize(
                num_buffers=3 * processes, num_cached=cached, max_in_flight=processes
            ),
            num_slots=len(layout.units),
            block_bytes=_block_bytes(record_bytes),
        )

    return SystemRun(
        layout=layout,
        work=work,
        make_policy=make_policy,
        host=host,
        policy={"order": order, "striping": striping, "overlap": "none"},
        cached_bytes=cached * record_bytes,
    )


def _engine_record_elements(run: ScenarioRun) -> int:
    given = run.subgroup_parameters
    return round(given) if given else max(RECORD_ELEMENTS, round(run.parameters) // _MOST_RECORDS)


def _block_bytes(record_bytes: int) -> int:
    return max(MIB, round_up(record_bytes // _BLOCKS_OF_A_RECORD, MIB))


def _layout(run: ScenarioRun, *, codec: str, record_elements: int) -> ModelLayout:
    """Returns the layout of a model of equal blocks, each one weight."""
    size = max(round(run.parameters) // run.layers, 1)
    units = [
        UnitFacts(
            name=f"layers.{index:04d}",
            parameters=(
                ParameterFacts(name=f"layers.{index:04d}.weight", shape=(size,), dtype="bfloat16"),
            ),
        )
        for index in range(run.layers)
    ]
    return build_layout(units, codec=codec, record_elements=record_elements)


def _passes(layout: ModelLayout, run: ScenarioRun, machine: ScenarioMachine) -> list[PassTimes]:
    """Two operations for each parameter and token forward, four backward."""
    if machine.flops_per_s is None:
        return [PassTimes(forward_s=0.0, backward_s=0.0)] * len(layout.units)
    elements = sum(shard.num_elements for shard in layout.units[0].shards)
    rate = machine.flops_per_s * max(machine.gpus, 1)
    forward_s = 2 * elements * run.tokens / rate
    return [PassTimes(forward_s=forward_s, backward_s=2 * forward_s)] * len(layout.units)


def _host_plan(run: ScenarioRun, layout: ModelLayout, parameters: Placement) -> HostPlan:
    """Returns how a node's memory is cut; where only a cache is given, with just that cache."""
    on_device = run.policy.parameters == "device" and run.system == "engine"
    resident = layout.parameter_bytes if on_device else 0  # not in the host's memory
    if run.host_budget is not None:
        plan = plan_host(
            layout,
            budget_bytes=run.host_budget + resident,
            parameters=parameters,
            optimizer="storage",
            prefetch_distance=run.policy.prefetch,
            keeps_records=bool(resolve_order(_order_of(run)).kept(1, 1, step=1)),
            window_bytes=_window_bytes(layout),
        )
        return replace(
            plan,
            budget_bytes=run.host_budget,
            resident_parameter_bytes=plan.resident_parameter_bytes - resident,
            smallest_bytes=plan.smallest_bytes - resident,
        )
    free = plan_host(
        layout,
        budget_bytes=0,
        parameters=parameters,
        optimizer="storage",
        prefetch_distance=run.policy.prefetch,
    )
    num_cached = _given_cache(run, free.state_buffer_bytes, len(layout.records))
    sizes = {
        "state_bytes": free.state_buffer_bytes,
        "beside_bytes": free.beside_buffer_bytes,
        "num_records": len(layout.records),
    }
    window_bytes = _window_bytes(layout)
    if num_cached:
        window = cut_window_beside_cache(window_bytes, free_bytes=4 * window_bytes, **sizes)
    else:
        window = cut_window(window_bytes, **sizes)
    plan = replace(
        free,
        num_cached=num_cached,
        num_buffers=window.num_buffers,
        num_places=window.num_places,
        num_slots=free.num_slots + run.policy.prefetch if free.slot_bytes else 0,
        resident_parameter_bytes=free.resident_parameter_bytes - resident,
        smallest_bytes=free.smallest_bytes - resident,
    )
    return replace(plan, budget_bytes=plan.planned_bytes)


def _window_bytes(layout: ModelLayout) -> int:
    """Returns a window of as many records as that of a model with records of the usual size."""
    return WINDOW_BYTES * max(layout.record_elements, RECORD_ELEMENTS) // RECORD_ELEMENTS


def _given_cache(run: ScenarioRun, record_bytes: int, num_records: int) -> int:
    if run.cache_fraction is not None:
        return round(run.cache_fraction * num_records)
    if run.cache_memory is not None:
        return min(run.cache_memory // record_bytes, num_records)
    return 0


def _order_of(run: ScenarioRun) -> str:
    return {"deepspeed-like": "sequential", "mlp-like": "alternating"}.get(
        run.system, run.policy.order
    )
