"""Where a model's parameters and optimizer state live, and what an update of one needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from offload.layout import ModelLayout, Record, Subgroup
from offload.optim.kernels import Scalars
from offload.optim.seen_parameters import SeenParameters
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


class Transfer(Protocol):
    """Something that is being read or written."""

    def wait(self) -> None: ...
    def done(self) -> bool: ...
    def notify(self, event_fd: int | None) -> object: ...
    def waits_for(self) -> int | None:
        """Returns the number of the path that it waits for, None if it has ended."""
        ...


class StoredGradients(Protocol):
    """Gradients that do not stay in memory until the update."""

    def start_reading(self, subgroup: Subgroup, into: memoryview) -> Transfer:
        """Starts reading the gradients of a subgroup."""
        ...


class ParametersElsewhere(Protocol):
    """Where parameters that updates change in host memory live between steps.

    Attributes:
        flat: The flat shards there, by name.
    """

    @property
    def flat(self) -> Mapping[str, torch.Tensor]: ...
    def begin(self) -> None:
        """Makes host memory free to change."""
        ...

    def send(self, shard: str, start: int, stop: int) -> None:
        """Starts copying there elements of a flat shard that were updated."""
        ...

    def send_all(self) -> None:
        """Starts copying every parameter there."""
        ...

    def wait_all(self) -> None:
        """Waits until what was sent may be computed with."""
        ...

    def bring(self, names: Iterable[str]) -> None:
        """Copies parameters that were changed there to host memory."""
        ...

    def changed(self) -> list[str]:
        """Returns the parameters whose bytes there are not those in host memory."""
        ...


@dataclass(slots=True, kw_only=True)
class ModelState:
    """Where the parameters and the optimizer state of a model live.

    Attributes:
        store: Holds what is not resident; None where everything is.
        parameters: Resident flat shards by name, or None where parameters live on storage.
        elsewhere: Where resident parameters live between steps, if that is not host memory.
        seen: What resident parameters were, where the user writes to this memory itself.
        records: Resident records by name, uint8, or None where the state lives on storage.
        gradients: Flat accumulators of the trainable shards that are not spilled, by name.
        has_fp32_gradients: Whether gradients accumulate in fp32, whatever the parameter's dtype.
        spilled: The gradients of the other trainable shards; None where there are none.
        edited: Parameters that the user changed since their state was last written: their
            master is the parameter itself again.
        dirty: Resident and cached records that differ from the store's.
    """

    layout: ModelLayout
    store: BlockStore | None
    parameters: dict[str, torch.Tensor] | None
    records: dict[str, torch.Tensor] | None
    gradients: dict[str, torch.Tensor]
    elsewhere: ParametersElsewhere | None = None
    seen: SeenParameters | None = None
    spilled: StoredGradients | None = None
    has_fp32_gradients: bool = False
    edited: set[str] = field(default_factory=set)
    dirty: set[str] = field(default_factory=set)


def state_key(record: Record) -> str:
    """Returns the name under which the store keeps the state of `record`."""
    return f"state/{record.name}"


def parameter_key(subgroup: Subgroup) -> str:
    """Returns the name under which the store keeps the parameters of `subgroup`."""
    return f"parameter/{subgroup.name}"
