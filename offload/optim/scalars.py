"""The scalars of an optimizer's step: computed in float64, each rounded once to fp32."""

from dataclasses import dataclass, replace

import numpy as np

from offload.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """What one step of one parameter multiplies and adds; each is an fp32 value.

    A rule uses some of them: docs/numerics.md.
    """

    b1: float = 0.0
    """beta1, or momentum"""
    c1: float = 0.0
    """1 - beta1, or 1 - dampening"""
    b2: float = 0.0
    """beta2"""
    c2: float = 0.0
    """1 - beta2"""
    q: float = 1.0
    """1 - lr * weight_decay"""
    w: float = 0.0
    """weight_decay where it goes into the gradient"""
    u: float = 0.0
    """The negative step size"""
    r: float = 0.0
    """1 / (1 - beta2**t)**0.5"""
    e: float = 0.0
    """eps"""
    a: float = 0.0
    """initial_accumulator_value in the first step"""
    is_nesterov: bool = False


def adamw_scalars(
    *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> Scalars:
    """Returns AdamW's scalars of a parameter's own step number `step`, counted from 1.

    Raises:
        ConfigError: `step` is below 1, or a beta is not in [0, 1).
    """
    moments = _adam_moments("AdamW", lr=lr, betas=betas, eps=eps, step=step)
    return replace(moments, q=to_fp32(1 - lr * weight_decay))


def adam_scalars(
    *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> Scalars:
    """Returns Adam's scalars: the decay goes into the gradient. See `adamw_scalars`."""
    moments = _adam_moments("Adam", lr=lr, betas=betas, eps=eps, step=step)
    return replace(moments, w=to_fp32(weight_decay))


def _adam_moments(
    title: str, *, lr: float, betas: tuple[float, float], eps: float, step: int
) -> Scalars:
    """Returns what Adam and AdamW have in common: all but the decay."""
    beta1, beta2 = _checked_betas(title, betas)
    _check_step(title, step)
    return Scalars(
        c1=to_fp32(1 - beta1),
        c2=to_fp32(1 - beta2),
        b2=to_fp32(beta2),
        u=to_fp32(-(lr / (1 - beta1**step))),
        r=to_fp32(1 / (1 - beta2**step) ** 0.5),
        e=to_fp32(eps),
    )


def lion_scalars(*, lr: float, betas: tuple[float, float], weight_decay: float) -> Scalars:
    """Returns Lion's scalars, the same in every step.

    Raises:
        ConfigError: A beta is not in [0, 1).
    """
    beta1, beta2 = _checked_betas("Lion", betas)
    return Scalars(
        b1=to_fp32(beta1),
        c1=to_fp32(1 - beta1),
        b2=to_fp32(beta2),
        c2=to_fp32(1 - beta2),
        q=to_fp32(1 - lr * weight_decay),
        u=to_fp32(-lr),
    )


def sgd_scalars(
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    step: int = 1,
) -> Scalars:
    """Returns the scalars of SGD, with or without momentum; see `adamw_scalars`.

    As in torch the first step is not dampened.
    """
    _check_step("SGD", step)
    return Scalars(
        b1=to_fp32(momentum),
        c1=1.0 if step == 1 else to_fp32(1 - dampening),
        w=to_fp32(weight_decay),
        u=to_fp32(-lr),
        is_nesterov=nesterov,
    )


def adagrad_scalars(
    *,
    lr: float,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    step: int,
) -> Scalars:
    """Returns Adagrad's scalars of step number `step`, counted from 1; see `adamw_scalars`."""
    _check_step("Adagrad", step)
    return Scalars(
        w=to_fp32(weight_decay),
        u=to_fp32(-(lr / (1 + (step - 1) * lr_decay))),
        e=to_fp32(eps),
        a=to_fp32(initial_accumulator_value) if step == 1 else 0.0,
    )


def to_fp32(value: float) -> float:
    """Returns `value` rounded once to fp32, to nearest even; beyond its range an infinity."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _check_step(optimizer: str, step: int) -> None:
    if step < 1:
        raise ConfigError(
            f"cannot make {optimizer}'s scalars: expected `step` from 1, found {step}; count a "
            "parameter's own updates"
        )


def _checked_betas(optimizer: str, betas: tuple[float, float]) -> tuple[float, float]:
    beta1, beta2 = betas
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ConfigError(
            f"cannot make {optimizer}'s scalars: expected `betas` in [0, 1), found {betas}; "
            "set `optimizer.betas`"
        )
    return beta1, beta2
