"""Facts about parameters, without their values."""

import math
from dataclasses import dataclass

from offload.layout.dtypes import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """What a layout needs to know of one parameter.

    A tied parameter has one `ParameterFacts`; `name` is the code-point smallest of its names
    and `aliases` are the others.
    """

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    dtype: str
    is_trainable: bool = True

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """The parameters of one unit, in the order in which they are laid out."""

    name: str
    parameters: tuple[ParameterFacts, ...]
