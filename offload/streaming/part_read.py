"""A part of a wide unit that is being read."""

from dataclasses import dataclass

import torch

from offload.streaming.unit import StreamedUnit, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """A part of a wide unit on its way into a slot, which `memory` owns."""

    unit: StreamedUnit
    part: range
    memory: torch.Tensor
    transfers: list[Transfer]
