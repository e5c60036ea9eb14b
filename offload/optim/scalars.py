"""The scalars of an optimizer's step: computed in float64, each rounded once to fp32."""

from dataclasses import dataclass

import numpy as np

from offload.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWScalars:
    """What one AdamW step of one parameter multiplies and adds; each is an fp32 value."""

    c1: float
    """1 - beta1"""
    c2: float
    """1 - beta2"""
    b2: float
    """beta2"""
    q: float
    """1 - lr * weight_decay"""
    u: float
    """-(lr / (1 - beta1**t))"""
    r: float
    """1 / (1 - beta2**t)**0.5"""
    e: float
    """eps"""


def adamw_scalars(
    *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> AdamWScalars:
    """Returns the scalars of a parameter's own step number `step`, counted from 1.

    Raises:
        ConfigError: `step` is below 1, or a beta is not in [0, 1).
    """
    beta1, beta2 = betas
    if step < 1:
        raise ConfigError(f"cannot make AdamW's scalars: expected `step` from 1, found {step}")
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ConfigError(
            f"cannot make AdamW's scalars: expected `betas` in [0, 1), found {betas}; "
            "set `optimizer.betas`"
        )
    return AdamWScalars(
        c1=to_fp32(1 - beta1),
        c2=to_fp32(1 - beta2),
        b2=to_fp32(beta2),
        q=to_fp32(1 - lr * weight_decay),
        u=to_fp32(-(lr / (1 - beta1**step))),
        r=to_fp32(1 / (1 - beta2**step) ** 0.5),
        e=to_fp32(eps),
    )


def to_fp32(value: float) -> float:
    """Returns `value` rounded once to fp32, to nearest even; beyond its range an infinity."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))
