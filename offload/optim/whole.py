"""Updates of whole matrices, written in torch: an extension point beside the fused kernels.

[Note: whole-matrix updates]
Such an update sees a parameter as it is shaped, with its fp32 master, gradient and state, on a
device of its choice. Its subgroup is exactly that parameter: subgroups end at its borders. What
it returns is the new master; rounding to the parameter, codecs, storage and digests are those of
every other update.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from offload.optim.codec import canonical
from offload.optim.operands import Operands, gradient_factors
from offload.optim.reference import load_master, scaled_gradient, store_master


class WholeUpdate(Protocol):
    """Updates one matrix. See [Note: whole-matrix updates]."""

    @property
    def device(self) -> torch.device:
        """Where it computes; operands are moved there and back."""
        ...

    def __call__(self, master: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Returns the new master.

        Shapes: All of the parameter's shape, fp32, on `device`. `state` is updated in place;
        the others are not changed.
        """
        ...


@torch.no_grad()
def update_whole(
    operands: Operands,
    shape: Sequence[int],
    update: WholeUpdate,
    *,
    gradient_scales: Sequence[float] = (),
) -> None:
    """Carries out `update` on the one parameter that `operands` hold, in place.

    Args:
        operands: Of the parameter alone, without gaps.
        shape: The parameter's.
        update: What to do.
        gradient_scales: As for `Kernels.update`.
    """
    device = update.device
    gradient = scaled_gradient(operands.gradient, gradient_factors(gradient_scales))
    state = {name: values.view(*shape).to(device) for name, values in operands.state.items()}
    master = update(
        load_master(operands).view(*shape).to(device), gradient.view(*shape).to(device), state
    )
    for name, values in state.items():
        operands.state[name].copy_(canonical(values.reshape(-1)))
    store_master(operands, canonical(master.reshape(-1).to("cpu", torch.float32)))
