"""How large the records of a new store are."""

from collections.abc import Callable
from dataclasses import replace

from offload.layout import RECORD_ELEMENTS, ModelLayout
from offload.plan.host import HostPlan
from offload.plan.storage import BLOCK_BYTES, store_space
from offload.plan.update_time import PlannedLayout, fastest_plan

SIZES = tuple(RECORD_ELEMENTS >> shift for shift in range(5))
"""Elements of records that are tried, the largest first."""
_MOST_RECORDS = 1 << 14
"""Smaller records than this many of a model take are not tried: each costs work in every step."""


def choose_records(
    plan: Callable[[int], tuple[ModelLayout, HostPlan]],
) -> tuple[ModelLayout, HostPlan]:
    """Returns the layout and the plan with the records that suit the budget best.

    These are the largest of those with which the simulated step is shortest: smaller ones leave
    more of a short budget to the cache, and each of them costs something. The plan's smallest
    budget is that of the smallest records.

    Blocks of a store are not shared by records. So sizes that leave a third of the blocks unused,
    which take up to 2.7 times the space, are chosen where no other fits alone.

    Args:
        plan: Lays the model out with records of at most so many elements, and plans its memory.
    """
    tried = [plan(elements) for elements in _sizes_for(plan(SIZES[0])[0])]
    smallest_bytes = min(tried[0][1].smallest_bytes, tried[-1][1].smallest_bytes)
    fitting = [each for each in tried if each[1].fits] or tried[-1:]
    frugal = [(layout, found) for layout, found in fitting if not _wastes_space(layout, found)]
    best = fastest_plan(
        [PlannedLayout(layout=layout, host=found) for layout, found in frugal or fitting]
    )
    return best.layout, replace(best.host, smallest_bytes=smallest_bytes)


def _sizes_for(layout: ModelLayout) -> list[int]:
    total = layout.trainable_elements
    return [size for size in SIZES if size == SIZES[0] or total // size <= _MOST_RECORDS]


def _wastes_space(layout: ModelLayout, plan: HostPlan) -> bool:
    """Returns whether its records leave much of their blocks unused, where they have some."""
    if not plan.state_buffer_bytes and not plan.parameter_buffer_bytes:
        return False  # what is committed is not rewritten in every step
    return store_space(
        layout, block_bytes=BLOCK_BYTES, durability="none", num_buffers=0
    ).is_mostly_unused
