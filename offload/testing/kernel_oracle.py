"""AdamW and the gradient norm in NumPy, one fp32 operation at a time.

Written from docs/numerics.md, on purpose without any code of `offload`: element-wise float32
operations of NumPy round once to nearest even and never fuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
NAN_BITS = 0x7FC00000


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleScalars:
    """The scalars of one step, as in docs/numerics.md."""

    c1: np.float32
    c2: np.float32
    b2: np.float32
    q: np.float32
    u: np.float32
    r: np.float32
    e: np.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleState:
    """Master and moments, all fp32, of one length."""

    master: FloatArray
    exp_avg: FloatArray
    exp_avg_sq: FloatArray

    def part(self, start: int, stop: int) -> "OracleState":
        """Returns elements `start` to `stop - 1`, as views."""
        return replace(
            self,
            master=self.master[start:stop],
            exp_avg=self.exp_avg[start:stop],
            exp_avg_sq=self.exp_avg_sq[start:stop],
        )


def scalars(
    *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> OracleScalars:
    """Returns the scalars in float64, each rounded once."""
    beta1, beta2 = betas
    return OracleScalars(
        c1=np.float32(1 - beta1),
        c2=np.float32(1 - beta2),
        b2=np.float32(beta2),
        q=np.float32(1 - lr * weight_decay),
        u=np.float32(-(lr / (1 - beta1**step))),
        r=np.float32(1 / (1 - beta2**step) ** 0.5),
        e=np.float32(eps),
    )


def adamw(
    state: OracleState, gradient: FloatArray, k: OracleScalars, factors: Sequence[float] = ()
) -> OracleState:
    """Returns the state after one step; `factors` are multiplied onto the gradient in order."""
    with np.errstate(all="ignore"):
        g = _scaled(gradient, factors)
        m, v = state.exp_avg, state.exp_avg_sq
        p1 = state.master * k.q
        s = g - m
        if k.c1 < np.float32(0.5):
            s = k.c1 * s
            m = m + s
        else:
            s = s * (np.float32(1) - k.c1)
            m = g - s
        x = k.b2 * v
        y = k.c2 * g
        y = y * g
        v = x + y
        d = np.sqrt(v)
        d = d * k.r
        d = d + k.e
        n = k.u * m
        n = n / d
        p = p1 + n
    return OracleState(master=_one_nan(p), exp_avg=_one_nan(m), exp_avg_sq=_one_nan(v))


def sum_of_squares(gradient: FloatArray, factors: Sequence[float] = ()) -> float:
    """Returns the float64 sum in norm blocks of 4096 elements and 16 lanes."""
    with np.errstate(all="ignore"):
        values = _scaled(gradient, factors).astype(np.float64)
        total = np.float64(0)
        for start in range(0, len(values), 4096):
            lanes = np.zeros(16)
            block = values[start : start + 4096]
            for row in range(0, len(block), 16):
                squares = block[row : row + 16] * block[row : row + 16]
                lanes[: len(squares)] = lanes[: len(squares)] + squares
            for half in (8, 4, 2, 1):
                lanes = lanes[:half] + lanes[half:]
            total = total + lanes[0]
    return float(total)


def bf16_of(master: FloatArray) -> NDArray[np.uint16]:
    """Returns the bits of the bf16 parameter: ties away from zero in bit space."""
    return ((master.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def low_of(master: FloatArray) -> NDArray[np.int16]:
    """Returns `master_low`: the signed difference of the master's and the parameter's bits."""
    rounded = bf16_of(master).astype(np.int64) << 16
    low = master.view(np.uint32).astype(np.int64) - rounded
    assert low.size == 0 or (low.min() >= -0x8000 and low.max() <= 0x7FFF)
    return low.astype(np.int16)


def fp32_of(bf16: NDArray[np.uint16]) -> FloatArray:
    """Returns the fp32 values of bf16 bits."""
    return (bf16.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scaled(gradient: FloatArray, factors: Sequence[float]) -> FloatArray:
    g = gradient
    for factor in factors:
        if np.float32(factor) != np.float32(1):
            g = g * np.float32(factor)
    return g


def _one_nan(values: NDArray[Any]) -> FloatArray:
    bits = values.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(values), np.uint32(NAN_BITS), bits).view(np.float32)
