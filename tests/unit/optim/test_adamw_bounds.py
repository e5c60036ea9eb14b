"""How far the kernels are from stock torch.optim.AdamW and from float64: docs/numerics.md."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offload.optim.kernels import Operands, Range, adamw_scalars, load_kernels

SIZE = 20_000
NUM_STEPS = 12


@dataclass(kw_only=True)
class State:
    """One step's arrays, in float64 where they are compared."""

    weight: NDArray[Any]
    exp_avg: NDArray[Any]
    exp_avg_sq: NDArray[Any]


@dataclass(kw_only=True)
class Bounds:
    """The most that a step may be off, element by element."""

    weight: NDArray[Any]
    exp_avg: NDArray[Any]
    exp_avg_sq: NDArray[Any]


def ulp(values: NDArray[Any]) -> NDArray[Any]:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)


def in_float64(
    state: State, gradient: NDArray[Any], options: dict[str, Any]
) -> tuple[State, Bounds]:
    """The step in float64 with the same fp32 scalars, and the bounds that follow from it."""
    k = adamw_scalars(**options)
    g = gradient.astype(np.float64)
    s = k.c1 * (g - state.exp_avg)
    m = state.exp_avg + s
    x, y = k.b2 * state.exp_avg_sq, k.c2 * g * g
    d = np.sqrt(x + y) * k.r + k.e
    p1, n = state.weight * k.q, k.u * m / d
    # With beta1 below 0.5 the last addition is g - (1 - c1) * (g - m).
    last = (state.exp_avg, s) if k.c1 < 0.5 else (g, (1 - k.c1) * (g - state.exp_avg))
    spread = abs(k.u) * (np.abs(state.exp_avg) + np.abs(s)) / d
    return (
        State(weight=p1 + n, exp_avg=m, exp_avg_sq=x + y),
        Bounds(
            weight=2 * ulp(np.maximum(np.abs(p1), np.abs(n))) + 8 * 2.0**-24 * spread,
            exp_avg=3 * ulp(np.maximum(*map(np.abs, last))),
            exp_avg_sq=3 * ulp(np.maximum(x, y)),
        ),
    )


def in_torch(state: State, gradient: NDArray[Any], options: dict[str, Any], **how: Any) -> State:
    """One step of stock AdamW from the same state."""
    step = options["step"]
    parameter = torch.nn.Parameter(torch.from_numpy(state.weight.astype(np.float32)))
    hyper = {name: value for name, value in options.items() if name != "step"}
    optimizer = torch.optim.AdamW([parameter], **hyper, **how)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": torch.from_numpy(state.exp_avg.astype(np.float32)),
        "exp_avg_sq": torch.from_numpy(state.exp_avg_sq.astype(np.float32)),
    }
    parameter.grad = torch.from_numpy(gradient)
    optimizer.step()
    after = optimizer.state[parameter]
    return State(
        weight=parameter.detach().double().numpy(),
        exp_avg=after["exp_avg"].double().numpy(),
        exp_avg_sq=after["exp_avg_sq"].double().numpy(),
    )


def assert_within(found: State, expected: State, bounds: Bounds) -> None:
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        off = np.abs(getattr(found, name) - getattr(expected, name))
        assert (off <= getattr(bounds, name)).all(), name


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.3, 0.9)])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_step_is_within_the_stated_bounds(betas: tuple[float, float], scale: float) -> None:
    rng = np.random.default_rng(0)
    operands = Operands(
        parameter=torch.from_numpy(rng.standard_normal(SIZE).astype(np.float32)),
        gradient=torch.zeros(SIZE),
        state={"exp_avg": torch.zeros(SIZE), "exp_avg_sq": torch.zeros(SIZE)},
    )
    kernels = load_kernels()

    for step in range(1, NUM_STEPS + 1):
        options: dict[str, Any] = {
            "lr": 3e-3,
            "betas": betas,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "step": step,
        }
        before = State(
            weight=operands.parameter.double().numpy(),
            exp_avg=operands.state["exp_avg"].double().numpy(),
            exp_avg_sq=operands.state["exp_avg_sq"].double().numpy(),
        )
        gradient = (rng.standard_normal(SIZE) * scale).astype(np.float32)
        operands.gradient = torch.from_numpy(gradient)

        whole = Range(start=0, stop=SIZE, scalars=adamw_scalars(**options))
        kernels.update(operands, [whole])

        after = State(
            weight=operands.parameter.double().numpy(),
            exp_avg=operands.state["exp_avg"].double().numpy(),
            exp_avg_sq=operands.state["exp_avg_sq"].double().numpy(),
        )
        exact, bounds = in_float64(before, gradient, options)
        assert_within(after, exact, bounds)
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            assert_within(after, in_torch(before, gradient, options, **how), bounds)
