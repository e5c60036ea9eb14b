"""How the host budget is cut: the least that a model needs, then windows, of which the fastest."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from offload.layout import ModelLayout
from offload.plan.activations import ActivationPlan
from offload.plan.gradients import keep_gradients, spill_gradients
from offload.plan.host import UNBOUNDED_BYTES, HostPlan, Placement
from offload.plan.tiles import slot_bytes_of
from offload.plan.update_time import PlannedLayout, fastest_plan
from offload.plan.window import (
    LEAST_BUFFERS,
    WINDOW_BYTES,
    WindowCut,
    cut_window,
    cut_window_beside_cache,
)


def plan_host(
    layout: ModelLayout,
    *,
    budget_bytes: int,
    parameters: Placement,
    optimizer: Placement,
    gradient_dtype: Literal["parameter", "float32"] = "parameter",
    co_resident_units: int = 1,
    prefetch_distance: int = 2,
    keeps_records: bool = False,
    is_training: bool = True,
    is_unified: bool = True,
    activations: ActivationPlan | None = None,
    spills_gradients: bool = False,
    tiled: frozenset[str] = frozenset(),
    window_bytes: int = WINDOW_BYTES,
) -> HostPlan:
    """Returns how `budget_bytes` are cut for `layout`; `fits` says whether they suffice.

    Args:
        co_resident_units: Most units that one call needs at once (tied parameters).
        prefetch_distance: Units fetched ahead, each into a slot beside those in use.
        keeps_records: Whether the order finds records in memory: what is left is their cache.
        is_unified: Whether the device computes in host memory. Else slots stage what is on its
            way between storage and the device.
        activations: What of them moves through host memory.
        spills_gradients: Whether gradients go to storage where the budget is too short for all.
        tiled: Names of units that no slot holds as a whole.
        window_bytes: Of records that are read, updated and written at one time, at most.
    """
    least = _least(
        layout,
        budget_bytes=budget_bytes,
        parameters=parameters,
        optimizer=optimizer,
        num_slots=co_resident_units if is_unified else 1,
        is_training=is_training,
        tiled=tiled,
    )
    if is_training:
        least = _with_activations(least, activations or ActivationPlan())
        least = _with_gradients(least, layout, gradient_dtype, may_spill=spills_gradients)
    least = replace(least, smallest_bytes=least.smallest_bytes or _with_one_record(least))
    prefetching = _with_slots(least, most=prefetch_distance, free_bytes=_free_bytes(least))
    most_slots = len(layout.units) if is_unified and budget_bytes < UNBOUNDED_BYTES else 0
    keeps_records = keeps_records and bool(least.state_buffer_bytes)
    plans = [
        _filled(prefetching, window, layout, keeps_records=keeps_records, most_slots=most_slots)
        for window in _windows(prefetching, layout, window_bytes, keeps_records=keeps_records)
    ]
    return fastest_plan([PlannedLayout(layout=layout, host=plan) for plan in plans]).host


def _least(
    layout: ModelLayout,
    *,
    budget_bytes: int,
    parameters: Placement,
    optimizer: Placement,
    num_slots: int,
    is_training: bool,
    tiled: frozenset[str],
) -> HostPlan:
    """Returns the plan with what lives in memory and the fewest slots, and no window."""
    on_host = parameters != "storage"
    state_buffer = parameter_buffer = 0
    if is_training and optimizer == "storage":
        state_buffer = max((record.padded_bytes for record in layout.records), default=0)
    if is_training and not on_host:
        parameter_buffer = max((r.padded_parameter_bytes for r in layout.records), default=0)
    return HostPlan(
        budget_bytes=budget_bytes,
        resident_parameter_bytes=layout.parameter_bytes if on_host else 0,
        resident_state_bytes=layout.state_bytes if is_training and optimizer == "host" else 0,
        slot_bytes=0 if on_host else slot_bytes_of(layout, tiled),
        num_slots=0 if on_host else num_slots,
        state_buffer_bytes=state_buffer,
        parameter_buffer_bytes=parameter_buffer,
        num_buffers=0,
        num_places=0,
        num_cached=0,
        smallest_bytes=0,
    )


def _with_activations(plan: HostPlan, activations: ActivationPlan) -> HostPlan:
    return replace(
        plan,
        activation_bytes=activations.memory_bytes,
        activation_slot_bytes=activations.slot_bytes,
    )


def _with_gradients(
    plan: HostPlan,
    layout: ModelLayout,
    dtype: Literal["parameter", "float32"],
    *,
    may_spill: bool,
) -> HostPlan:
    """Returns the plan with all gradients, or with spilled ones where only these fit."""
    kept = replace(plan, gradients=keep_gradients(layout, dtype))
    smallest_bytes = _with_one_record(kept)
    if may_spill:
        spilled = replace(plan, gradients=spill_gradients(layout, dtype))
        spilled_bytes = _with_one_record(spilled)
        if plan.budget_bytes < smallest_bytes and spilled_bytes < smallest_bytes:
            kept = spilled
        smallest_bytes = min(smallest_bytes, spilled_bytes)
    return replace(kept, smallest_bytes=smallest_bytes)


def _with_one_record(plan: HostPlan) -> int:
    """Returns the bytes of a plan without a window with the shortest one."""
    return plan.planned_bytes + plan.buffer_bytes


def _free_bytes(plan: HostPlan) -> int:
    """Returns what the budget leaves to a plan without a window beside the shortest one."""
    return max(plan.budget_bytes - _with_one_record(plan), 0)


def _with_slots(plan: HostPlan, *, most: int, free_bytes: int) -> HostPlan:
    """Returns the plan with as many more slots as `free_bytes` hold, `most` at most."""
    more = min(most, free_bytes // plan.slot_bytes) if plan.slot_bytes else 0
    return replace(plan, num_slots=plan.num_slots + more)


def _windows(
    plan: HostPlan, layout: ModelLayout, window_bytes: int, *, keeps_records: bool
) -> Iterator[WindowCut]:
    """Yields the windows that there is room for; beside a cache also those of few buffers."""
    free_bytes = _free_bytes(plan) + plan.buffer_bytes
    sizes = {
        "state_bytes": plan.state_buffer_bytes,
        "beside_bytes": plan.beside_buffer_bytes,
        "num_records": len(layout.records),
    }
    if not keeps_records:
        yield cut_window(min(window_bytes, free_bytes), **sizes)
        return
    for most in (None, *range(LEAST_BUFFERS, 0, -1)):
        yield cut_window_beside_cache(
            window_bytes, free_bytes=free_bytes, most_buffers=most, **sizes
        )


def _filled(
    plan: HostPlan,
    window: WindowCut,
    layout: ModelLayout,
    *,
    keeps_records: bool,
    most_slots: int,
) -> HostPlan:
    """Returns the plan with a window, and what that leaves of the budget in use.

    Gradients that would be spilled come first, then records, then slots.

    Args:
        plan: Without a window.
        window: How it is cut.
        layout: Of the model.
        keeps_records: Whether the order finds records in memory.
        most_slots: With which calls may hold more units.
    """
    cut = replace(plan, num_buffers=window.num_buffers, num_places=window.num_places)
    left_bytes = _free_bytes(plan) + plan.buffer_bytes - window.num_bytes - plan.workspace_bytes
    gradients = plan.gradients
    if gradients.spilled:
        room_bytes = max(left_bytes, 0)
        gradients = spill_gradients(layout, gradients.dtype, room_bytes=room_bytes)
        left_bytes -= gradients.resident_bytes
    num_cached = 0
    if keeps_records:
        num_cached = max(left_bytes, 0) // plan.state_buffer_bytes
        num_cached = min(len(layout.records), num_cached)
        left_bytes -= plan.state_buffer_bytes * num_cached
    filled = replace(cut, gradients=gradients, num_cached=num_cached)
    more_slots = max(most_slots - plan.num_slots, 0)
    return _with_slots(filled, most=more_slots, free_bytes=max(left_bytes, 0))
