"""How large the records of a new store are."""

from collections.abc import Callable
from dataclasses import replace

from offload.layout import RECORD_ELEMENTS, ModelLayout
from offload.plan.host import HostPlan
from offload.plan.window import LEAST_BUFFERS
from offload.sizes import MIB

SIZES = tuple(RECORD_ELEMENTS >> shift for shift in range(5))
"""Elements of records that are tried, the largest first."""
_BLOCK_ELEMENTS = MIB // 2
"""A subgroup whose bf16 parameters fill a block of storage: smaller ones waste part of it."""
_MOST_RECORDS = 1 << 14
"""Smaller records than this many of a model take are not tried: each costs work in every step."""


def choose_records(
    plan: Callable[[int], tuple[ModelLayout, HostPlan]],
) -> tuple[ModelLayout, HostPlan]:
    """Returns the layout and the plan with the records that suit the budget best.

    These are the largest of which enough are in the window, down to those that fill a block of
    storage, and smaller ones only where the model would not fit otherwise. The plan's smallest
    budget is that of the smallest records.

    Args:
        plan: Lays the model out with records of at most so many elements, and plans its memory.
    """
    sizes = _sizes_for(plan(SIZES[0])[0])
    smallest_bytes = plan(sizes[-1])[1].smallest_bytes
    chosen = None
    for elements in sizes:
        if chosen is not None and elements < _BLOCK_ELEMENTS:
            break
        layout, found = plan(elements)
        if found.fits:
            chosen = layout, found
            if _is_enough(layout, found):
                break
    layout, found = chosen or plan(sizes[-1])
    return layout, replace(found, smallest_bytes=min(smallest_bytes, found.smallest_bytes))


def _sizes_for(layout: ModelLayout) -> list[int]:
    total = layout.trainable_elements
    return [size for size in SIZES if size == SIZES[0] or total // size <= _MOST_RECORDS]


def _is_enough(layout: ModelLayout, plan: HostPlan) -> bool:
    least = min(LEAST_BUFFERS, len(layout.records))
    return not plan.buffer_bytes or plan.num_buffers >= least
