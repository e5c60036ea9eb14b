"""The codecs' bits: fp32 master to bf16 parameter and back, the same as the kernels'.

[Note: ties away in bit space]
The parameter is `(bits + 0x8000) >> 16` of the master's bits, and nothing else in the project
rounds like that. `master_low` is the signed difference, which is the master's low 16 bits read
as int16. The two determine the master for every finite value and infinity; round half to even
could not be inverted at ties. A NaN master is 0x7fc00000, a NaN parameter thus 0x7fc0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_HALF = 0x8000


class SplitMaster(NamedTuple):
    """A master under codec `split`."""

    parameter: Tensor
    """bf16"""
    master_low: Tensor
    """int16"""


def split_master(master: Tensor) -> SplitMaster:
    """Returns the bf16 parameter and `master_low` of an fp32 master of any shape."""
    bits = _canonical_bits(master)
    # Within int16: torch does not say what a narrowing of more than that gives.
    low = ((bits & 0xFFFF) ^ _HALF) - _HALF
    return SplitMaster(_rounded(bits), low.to(torch.int16))


def join_master(parameter: Tensor, master_low: Tensor) -> Tensor:
    """Returns the fp32 master of a bf16 parameter and its `master_low`."""
    bits = (parameter.detach().view(torch.int16).to(torch.int32) << 16) + master_low.to(torch.int32)
    return bits.view(torch.float32)


def round_master(master: Tensor) -> Tensor:
    """Returns the bf16 parameter of an fp32 master."""
    return _rounded(_canonical_bits(master))


def canonical(values: Tensor) -> Tensor:
    """Returns fp32 `values` with every NaN made 0x7fc00000."""
    return values.masked_fill(values.isnan(), float("nan"))


def _canonical_bits(master: Tensor) -> Tensor:
    return canonical(master.detach()).view(torch.int32)


def _rounded(bits: Tensor) -> Tensor:
    return ((bits + _HALF) >> 16).to(torch.int16).view(torch.bfloat16)
