"""Bytes that one step moves between host memory and a device, computed from the policy alone."""

from dataclasses import dataclass
from typing import Literal

from offload.layout import DTYPES, ModelLayout
from offload.plan.gradients import gradient_dtype_of
from offload.plan.host import Placement
from offload.plan.traffic import ModelBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Bytes of one step over the link to a device with memory of its own."""

    in_bytes: int
    """To the device: parameters, and gradients that a later micro-step adds to."""
    out_bytes: int
    """From it: gradients."""

    def to_json(self) -> dict[str, int]:
        """Returns the key of `offload plan`."""
        return {"in_bytes_per_step": self.in_bytes, "out_bytes_per_step": self.out_bytes}


def link_traffic(
    layout: ModelLayout,
    *,
    parameters: Placement,
    gradient_dtype: Literal["parameter", "float32"],
    micro_steps: int,
    kept_backward_bytes: int = 0,
) -> LinkTraffic:
    """Returns what a step of the model of `layout` moves over the link.

    Args:
        layout: Of the model.
        parameters: Where they live. On the device a step copies there what it changed; else each
            pass copies what it uses.
        gradient_dtype: In which gradients accumulate.
        micro_steps: Forward and backward passes in the step.
        kept_backward_bytes: Parameters still in a slot when a backward asks for them.
    """
    model = ModelBytes.of(layout)
    gradients = sum(
        placed.facts.num_elements * DTYPES[gradient_dtype_of(shard, gradient_dtype)].itemsize
        for shard, placed in layout.parameters.values()
        if shard.is_trainable
    )
    moved = model.trainable_parameter_bytes
    if parameters != "device":
        moved = micro_steps * (2 * model.parameter_bytes - kept_backward_bytes)
    return LinkTraffic(
        # The sum with an earlier gradient is made on the device, as autograd makes it.
        in_bytes=moved + (micro_steps - 1) * gradients,
        out_bytes=micro_steps * gradients,
    )
