"""How a model is cut into units for the memory that there is."""

import logging
from dataclasses import dataclass

from torch import nn

from offload.layout import ModelLayout
from offload.memory import usable_memory
from offload.plan.device import DevicePlan
from offload.plan.host import HostPlan
from offload.plan.record_size import choose_records
from offload.plan.tiles import choose_wide
from offload.sizes import format_size
from offload.streaming.discovery import DiscoveredModel, discover_units, whole_matrices
from offload.streaming.messages import listed
from offload.streaming.model_layout import lay_out
from offload.streaming.planner import Planner
from offload.streaming.wide import wide_candidates
from offload.streaming.wrap_options import Beside, WrapOptions

logger = logging.getLogger("offload.streaming")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The units of a model, their layout, and the plans of memory; these may not fit."""

    discovered: DiscoveredModel
    layout: ModelLayout
    planner: Planner
    host: HostPlan
    device: DevicePlan

    @property
    def fits(self) -> bool:
        return self.host.fits and self.device.fits

    def require_fit(self, beside: Beside, *, is_process_memory: bool) -> None:
        """Raises PlanError if a budget, or this machine, has too little.

        Args:
            beside: What other models have.
            is_process_memory: Whether the device's memory is this process's own.
        """
        self.host.require_fit(beside_bytes=beside.host_bytes, is_part=beside.has_host_part)
        self.device.require_fit(beside_bytes=beside.device_bytes, is_part=beside.has_device_part)
        usable_memory().require(
            beside.host_bytes + self.host.planned_bytes,
            smallest_bytes=beside.host_bytes + self.host.smallest_bytes,
            is_bounded=self.planner.options.budget_bytes is not None,
            device_bytes=beside.device_bytes + self.device.planned_bytes
            if is_process_memory
            else 0,
        )


def arrange(
    model: nn.Module,
    options: WrapOptions,
    *,
    prefix: str,
    stored: ModelLayout | None,
    keeps_records: bool,
    is_unified: bool,
) -> Arrangement:
    """Returns the arrangement of `model`: parameters are taken apart only where it needs that.

    Args:
        model: To wrap.
        options: How it is wrapped.
        prefix: Of the names of its units.
        stored: The layout of the store that is resumed, which is kept.
        keeps_records: Whether the order of updates leaves records in memory.
        is_unified: Whether the device computes in host memory.
    """

    def try_with(wide: frozenset[str]) -> Arrangement:
        discovered = discover_units(model, options.units, wide=wide)
        discovered.prefix_units(prefix)
        planner = Planner(
            options=options,
            co_resident_units=discovered.co_resident_units,
            keeps_records=keeps_records,
            is_unified=is_unified,
            tiled=discovered.wide_names,
        )

        def plan_with(record_elements: int) -> tuple[ModelLayout, HostPlan]:
            layout = lay_out(discovered, options, stored=stored, record_elements=record_elements)
            return layout, planner.host(layout)

        if stored is None:
            layout, host = choose_records(plan_with)
        else:
            layout, host = plan_with(stored.record_elements)
        return Arrangement(
            discovered=discovered,
            layout=layout,
            planner=planner,
            host=host,
            device=planner.device(layout),
        )

    plain = try_with(frozenset())
    if not options.is_streamed(is_unified=is_unified) or (stored is None and plain.fits):
        return plain
    whole = whole_matrices(plain.discovered, options.matrices)
    candidates = wide_candidates(model, besides=whole)

    def plans_with(names: frozenset[str]) -> tuple[HostPlan, DevicePlan]:
        tried = try_with(names)
        return tried.host, tried.device

    if stored is not None:
        wide = _wide_in(stored, candidates, prefix)
    else:
        wide = choose_wide(candidates, plans_with)
    return try_with(wide) if wide else plain


def log_strided(discovered: DiscoveredModel) -> None:
    """Logs which parameters become contiguous, before they do."""
    names = [
        name
        for unit in discovered.units
        for name, parameter in unit.parameters.items()
        # One that was evicted while it was built is an element expanded, and contiguous again.
        if not parameter.is_contiguous() and any(parameter.stride())
    ]
    if names:
        logger.warning(
            "parameters that are not contiguous are kept contiguous from now on, with the same "
            "values: %s; kernels that choose by strides, such as convolutions in `channels_last`, "
            "may round otherwise",
            listed(names),
        )


def log_wide(arrangement: Arrangement) -> None:
    """Logs each parameter that is computed in pieces."""
    for unit in arrangement.discovered.units:
        if unit.is_wide:
            logger.warning(
                "`%s` (%s) exceeds its slot: it is computed in pieces, and results are no longer "
                "those of the plain model bit for bit",
                unit.facts.name,
                format_size(unit.num_bytes),
            )


def _wide_in(stored: ModelLayout, candidates: list[str], prefix: str) -> frozenset[str]:
    """The parameters that the store has apart: units of one, under its name."""
    alone = {
        unit.name
        for unit in stored.units
        if next(unit.parameters()).facts.name == unit.name.removeprefix(prefix)
    }
    return frozenset(name for name in candidates if prefix + name in alone)
