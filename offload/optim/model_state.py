"""Where a model's parameters and optimizer state live, and what an update of one needs."""

from dataclasses import dataclass, field

import torch

from offload.layout import ModelLayout, Record, Subgroup
from offload.optim.kernels import Scalars
from offload.optim.whole import WholeUpdate
from offload.storage.store import BlockStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUpdate:
    """What one parameter's update needs besides its gradient.

    Attributes:
        scales: Factors pending on the gradient, applied in the pass.
        scalars: For the kernels.
        whole: Instead, for a parameter that is laid out as a whole matrix.
    """

    scales: tuple[float, ...]
    scalars: Scalars = field(default_factory=Scalars)
    whole: WholeUpdate | None = None


@dataclass(slots=True, kw_only=True)
class ModelState:
    """Where the parameters and the optimizer state of a model live.

    Attributes:
        store: Holds what is not resident; None where everything is.
        parameters: Resident flat shards by name, or None where parameters live on storage.
        records: Resident records by name, uint8, or None where the state lives on storage.
        gradients: Flat accumulators of the trainable shards by name.
        edited: Parameters that the user changed since their state was last written: their
            master is the parameter itself again.
        dirty: Resident and cached records that differ from the store's.
    """

    layout: ModelLayout
    store: BlockStore | None
    parameters: dict[str, torch.Tensor] | None
    records: dict[str, torch.Tensor] | None
    gradients: dict[str, torch.Tensor]
    edited: set[str] = field(default_factory=set)
    dirty: set[str] = field(default_factory=set)


def state_key(record: Record) -> str:
    """Returns the name under which the store keeps the state of `record`."""
    return f"state/{record.name}"


def parameter_key(subgroup: Subgroup) -> str:
    """Returns the name under which the store keeps the parameters of `subgroup`."""
    return f"parameter/{subgroup.name}"
