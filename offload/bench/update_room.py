"""Whether a made-up model has room in memory and on storage, asked before it is laid out."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offload.bench.update_baselines import RULES
from offload.bench.update_options import PARAMETER_ELEMENTS, UpdateOptions, made_up_layout
from offload.errors import PlanError
from offload.memory import usable_memory
from offload.plan.host import HostPlan
from offload.plan.host_cut import plan_host
from offload.plan.machine_profile import read_profile
from offload.plan.storage import StoragePath, usable_bytes
from offload.plan.window import window_bytes_for
from offload.policy import resolve_order
from offload.sizes import MIB, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNeed:
    """The least that a measurement needs."""

    memory_bytes: int
    storage_bytes: int


def host_plan(options: UpdateOptions) -> HostPlan:
    """Returns how the engine cuts the memory; a baseline gets a cache of as many bytes."""
    return plan_host(
        made_up_layout(options.parameters, codec=options.codec),
        budget_bytes=options.host_memory_bytes,
        parameters="host",
        optimizer="storage",
        keeps_records=_keeps_records(options),
        window_bytes=window_bytes_for(options.window_bytes, options.paths, read_profile()),
    )


def least_need(options: UpdateOptions) -> UpdateNeed:
    """Returns what is needed, by a layout of one whole weight and one of the last, smaller one.

    All weights but the last are equal, so the time does not grow with their number.
    """
    num_whole, rest = divmod(options.parameters, PARAMETER_ELEMENTS)
    rules = RULES.get(options.baseline)
    memory = buffer = state = 0
    for count, size in ((num_whole, PARAMETER_ELEMENTS), (1, rest)):
        if not count or not size:
            continue
        plan = host_plan(replace(options, parameters=size))
        memory += count * (plan.smallest_bytes - plan.buffer_bytes)
        buffer = max(buffer, plan.buffer_bytes)
        codec = "fp32" if rules else options.codec
        state += count * made_up_layout(size, codec=codec).state_bytes
    cached = 0
    if _keeps_records(options):  # at most this much of the state stays in memory
        cached = max(0, options.host_memory_bytes - memory)
    spilled = 4 * options.parameters if rules and rules.spills_gradients else 0
    # Under backward new versions lie beside the current ones until the step.
    versions = 2 if options.overlap in ("backward", "both") else 1
    stored = versions * max(0, state - cached)
    return UpdateNeed(memory_bytes=memory + buffer, storage_bytes=stored + spilled)


def check_room(options: UpdateOptions) -> None:
    """Raises PlanError where memory or the paths cannot hold the model."""
    need = least_need(options)
    what = f"cannot measure updates of {options.parameters} parameters"
    if need.memory_bytes > options.host_memory_bytes:
        raise PlanError(
            f"{what}: expected at least {need.memory_bytes} bytes "
            f"({format_size(need.memory_bytes)}) of `--host-memory`, found "
            f"{options.host_memory_bytes} bytes ({format_size(options.host_memory_bytes)}); raise "
            f"it to `{-(-need.memory_bytes // MIB)}MiB` or lower `--parameters`"
        )
    free = usable_bytes(_storage_paths(options.paths))
    if need.storage_bytes > free:
        raise PlanError(
            f"{what}: expected at least {need.storage_bytes} bytes "
            f"({format_size(need.storage_bytes)}) for their state on storage, found {free} bytes "
            f"({format_size(free)}) free but for a margin; name more `--path` or lower "
            "`--parameters`"
        )
    usable = usable_memory()
    if options.host_memory_bytes > usable.num_bytes:
        raise PlanError(
            f"{what}: expected `--host-memory` of no more than {usable.describe()}, found "
            f"{format_size(options.host_memory_bytes)}; lower it well below that"
        )


def _keeps_records(options: UpdateOptions) -> bool:
    rules = RULES.get(options.baseline)
    order = resolve_order(rules.order if rules else options.order)
    return bool(order.kept(1, 1, step=1))


def _storage_paths(paths: Sequence[Path]) -> list[StoragePath]:
    found = []
    for path in paths:
        usage = shutil.disk_usage(path)
        found.append(
            StoragePath(device=path.stat().st_dev, total_bytes=usage.total, free_bytes=usage.free)
        )
    return found
