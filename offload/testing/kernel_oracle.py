"""AdamW and the gradient norm in NumPy, one fp32 operation at a time.

Written from docs/numerics.md, on purpose without any code of `offload`: element-wise float32
operations of NumPy round once to nearest even and never fuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
NAN_BITS = 0x7FC00000


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleState:
    """Master and the rule's state, all fp32, of one length."""

    master: FloatArray
    state: dict[str, FloatArray]

    def part(self, start: int, stop: int) -> "OracleState":
        """Returns elements `start` to `stop - 1`, as views."""
        return OracleState(
            master=self.master[start:stop],
            state={name: values[start:stop] for name, values in self.state.items()},
        )


def update(
    rule: str,
    before: OracleState,
    gradient: FloatArray,
    options: dict[str, Any],
    factors: Sequence[float] = (),
) -> OracleState:
    """Returns the state after one step of `rule`; `factors` go onto the gradient in order."""
    with np.errstate(all="ignore"):
        g = _scaled(gradient, factors)
        decay = np.float32(options.get("weight_decay", 0))
        if rule not in ("adamw", "lion") and decay != 0:
            n = decay * before.master
            g = g + n
        p, state = _RULES[rule](before, g, options)
    return OracleState(
        master=_one_nan(p), state={name: _one_nan(values) for name, values in state.items()}
    )


_Result = tuple[NDArray[Any], dict[str, NDArray[Any]]]


def _adamw(before: OracleState, g: FloatArray, options: dict[str, Any]) -> _Result:
    q = np.float32(1 - options["lr"] * options["weight_decay"])
    return _adam_from(before.master * q, before, g, options)


def _adam(before: OracleState, g: FloatArray, options: dict[str, Any]) -> _Result:
    return _adam_from(before.master, before, g, options)


def _adam_from(
    p1: FloatArray, before: OracleState, g: FloatArray, options: dict[str, Any]
) -> _Result:
    beta1, beta2 = options["betas"]
    step = options["step"]
    c1, c2 = np.float32(1 - beta1), np.float32(1 - beta2)
    u = np.float32(-(options["lr"] / (1 - beta1**step)))
    r = np.float32(1 / (1 - beta2**step) ** 0.5)
    m, v = before.state["exp_avg"], before.state["exp_avg_sq"]
    s = g - m
    if c1 < np.float32(0.5):
        s = c1 * s
        m = m + s
    else:
        s = s * (np.float32(1) - c1)
        m = g - s
    x = np.float32(beta2) * v
    y = c2 * g
    y = y * g
    v = x + y
    d = np.sqrt(v)
    d = d * r
    d = d + np.float32(options["eps"])
    n = u * m
    n = n / d
    return p1 + n, {"exp_avg": m, "exp_avg_sq": v}


def _lion(before: OracleState, g: FloatArray, options: dict[str, Any]) -> _Result:
    beta1, beta2 = options["betas"]
    m = before.state["exp_avg"]
    p1 = before.master * np.float32(1 - options["lr"] * options["weight_decay"])
    x = np.float32(beta1) * m
    y = np.float32(1 - beta1) * g
    s = x + y
    sign = (s > 0).astype(np.float32) - (s < 0).astype(np.float32)
    n = np.float32(-options["lr"]) * sign
    x = np.float32(beta2) * m
    y = np.float32(1 - beta2) * g
    return p1 + n, {"exp_avg": x + y}


def _sgd(before: OracleState, g: FloatArray, options: dict[str, Any]) -> _Result:
    n = np.float32(-options["lr"]) * g
    return before.master + n, {}


def _momentum(before: OracleState, g: FloatArray, options: dict[str, Any]) -> _Result:
    mu = np.float32(options["momentum"])
    c = np.float32(1 - options["dampening"]) if options["step"] > 1 else np.float32(1)
    x = mu * before.state["momentum_buffer"]
    y = c * g
    m = x + y
    n = m
    if options["nesterov"]:
        x = mu * m
        n = g + x
    n = np.float32(-options["lr"]) * n
    return before.master + n, {"momentum_buffer": m}


def _adagrad(before: OracleState, g: FloatArray, options: dict[str, Any]) -> _Result:
    first = options["step"] == 1
    a = np.float32(options["initial_accumulator_value"] if first else 0)
    x = before.state["sum"] + a
    y = g * g
    v = x + y
    d = np.sqrt(v)
    d = d + np.float32(options["eps"])
    n = np.float32(-(options["lr"] / (1 + (options["step"] - 1) * options["lr_decay"]))) * g
    n = n / d
    return before.master + n, {"sum": v}


_RULES = {
    "adamw": _adamw,
    "adam": _adam,
    "lion": _lion,
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
}


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
