"""Bytes that one step moves between host memory and a device, computed from the policy alone."""

from dataclasses import dataclass
from typing import Literal

from offload.layout import DTYPES, ModelLayout, Unit
from offload.plan.gradients import gradient_dtype_of
from offload.plan.host import Placement
from offload.plan.traffic import ModelBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Bytes of one step over the link to a device with memory of its own."""

    micro_steps: int
    forward_in_bytes: int
    """Parameters that the first forward copies to the device."""
    later_forward_in_bytes: int
    """The same of each later one."""
    backward_in_bytes: int
    """The same of each backward."""
    update_in_bytes: int
    """Parameters that live on the device and that the update changed."""
    gradient_bytes: int
    """From the device, in the first micro-step's backward."""
    later_gradient_bytes: int
    """To it and from it again in each later one, which adds to them."""
    trailing_bytes: int
    """Of gradients, that may still be on their way when a backward is over: one unit's."""

    @property
    def in_bytes(self) -> int:
        """To the device: parameters, and gradients that a later micro-step adds to."""
        passes = self.forward_in_bytes + self.micro_steps * self.backward_in_bytes
        later = self.later_forward_in_bytes + self.later_gradient_bytes
        return passes + self.update_in_bytes + (self.micro_steps - 1) * later

    @property
    def out_bytes(self) -> int:
        """From it: gradients."""
        return self.gradient_bytes + (self.micro_steps - 1) * self.later_gradient_bytes

    def parameters_in(self, micro_step: int) -> int:
        """Returns the parameters that a forward copies to the device.

        Args:
            micro_step: From 0.
        """
        return self.later_forward_in_bytes if micro_step else self.forward_in_bytes

    def gradients_in(self, micro_step: int) -> tuple[int, int]:
        """Returns the gradients that go to the device and leave it during a backward, at least.

        Args:
            micro_step: From 0.
        """
        moved = self.later_gradient_bytes if micro_step else self.gradient_bytes
        return moved if micro_step else 0, max(moved - self.trailing_bytes, 0)

    def to_json(self) -> dict[str, int]:
        """Returns the key of `offload plan`."""
        return {"in_bytes_per_step": self.in_bytes, "out_bytes_per_step": self.out_bytes}


def link_traffic(
    layout: ModelLayout,
    *,
    parameters: Placement,
    gradient_dtype: Literal["parameter", "float32"],
    micro_steps: int,
    kept_forward_bytes: int = 0,
    kept_later_bytes: int = 0,
    kept_backward_bytes: int = 0,
    adds_on_device: bool = True,
) -> LinkTraffic:
    """Returns what a step of the model of `layout` moves over the link.

    Args:
        layout: Of the model.
        parameters: Where they live. On the device a step copies there what it changed; else each
            pass copies what it uses.
        gradient_dtype: In which gradients accumulate.
        micro_steps: Forward and backward passes in the step.
        kept_forward_bytes: By how much the first forward copies less than each unit once;
            negative: more.
        kept_later_bytes: The same of each later one.
        kept_backward_bytes: The same of a backward, which finds some in their slots.
        adds_on_device: Whether a later micro-step's gradient is added to the sum on the device, as
            autograd does where its tensors are not the host's.
    """
    model = ModelBytes.of(layout)
    by_unit = [_gradient_bytes(unit, gradient_dtype) for unit in layout.units]
    gradients = sum(by_unit)
    is_copied = parameters != "device"
    return LinkTraffic(
        micro_steps=micro_steps,
        forward_in_bytes=model.parameter_bytes - kept_forward_bytes if is_copied else 0,
        later_forward_in_bytes=model.parameter_bytes - kept_later_bytes if is_copied else 0,
        backward_in_bytes=model.parameter_bytes - kept_backward_bytes if is_copied else 0,
        update_in_bytes=0 if is_copied else model.trainable_parameter_bytes,
        gradient_bytes=gradients,
        later_gradient_bytes=gradients if adds_on_device else 0,
        trailing_bytes=max(by_unit, default=0),
    )


def _gradient_bytes(unit: Unit, dtype: Literal["parameter", "float32"]) -> int:
    return sum(
        placed.facts.num_elements * DTYPES[gradient_dtype_of(shard, dtype)].itemsize
        for shard in unit.shards
        if shard.is_trainable
        for placed in shard.parameters
    )
