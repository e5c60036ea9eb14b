"""How large the records of a new store are."""

from collections.abc import Callable
from dataclasses import replace

from offload.layout import RECORD_ELEMENTS, ModelLayout
from offload.plan.host import HostPlan
from offload.plan.window import num_at_once, waits_with
from offload.sizes import MIB

SIZES = tuple(RECORD_ELEMENTS >> shift for shift in range(5))
"""Elements of records that are tried, the largest first."""
_RECORD_BYTES = 2 * MIB
"""What a record costs in every step beside its transfers, as bytes that storage could have moved:
1.4 to 2.7 ms at 1.2 GB/s both ways together (docs/planning.md, records of 2^20 to 2^18)."""
_MOST_RECORDS = 1 << 14
"""Smaller records than this many of a model take are not tried: each costs work in every step."""


def choose_records(
    plan: Callable[[int], tuple[ModelLayout, HostPlan]],
) -> tuple[ModelLayout, HostPlan]:
    """Returns the layout and the plan with the records that suit the budget best.

    These are the largest of those with which a step costs least: smaller ones leave more of a short
    budget to the cache, and each of them costs something. The plan's smallest budget is that of the
    smallest records.

    Args:
        plan: Lays the model out with records of at most so many elements, and plans its memory.
    """
    tried = [plan(elements) for elements in _sizes_for(plan(SIZES[0])[0])]
    smallest_bytes = min(tried[0][1].smallest_bytes, tried[-1][1].smallest_bytes)
    fitting = [(layout, found) for layout, found in tried if found.fits]
    layout, found = min(fitting or tried[-1:], key=lambda each: step_cost_bytes(*each))
    return layout, replace(found, smallest_bytes=smallest_bytes)


def step_cost_bytes(layout: ModelLayout, plan: HostPlan) -> float:
    """Returns what the update of a step costs, in bytes moved both ways.

    Args:
        layout: Of the model.
        plan: How the host budget is cut for it.
    """
    num_records = max(len(layout.records), 1)
    streamed = plan.gradients.spilled_bytes
    if plan.state_buffer_bytes:
        streamed += layout.state_bytes * (num_records - plan.num_cached) // num_records
    if plan.parameter_buffer_bytes:
        streamed += layout.parameter_bytes
    # What stays in slots beyond those is not read again by backward.
    kept = min(plan.slot_bytes * plan.num_slots, layout.parameter_bytes)
    at_once = num_at_once(plan.num_buffers, plan.num_places, plan.num_cached, num_records)
    return waits_with(at_once) * 2 * streamed - kept + _RECORD_BYTES * num_records


def _sizes_for(layout: ModelLayout) -> list[int]:
    total = layout.trainable_elements
    return [size for size in SIZES if size == SIZES[0] or total // size <= _MOST_RECORDS]
