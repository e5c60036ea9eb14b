"""How far each rule is from stock torch.optim and from float64: docs/numerics.md."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offload.layout import RULES
from offload.optim.kernels import Operands, Range, load_kernels
from offload.testing.kernel_cases import scalars_of

SIZE = 20_000
SQUARES = {"exp_avg_sq", "sum"}
DECAY = {"weight_decay": 0.1}
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("adamw", torch.optim.AdamW, DECAY | {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}),
    ("adam", torch.optim.Adam, DECAY | {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}),
    ("sgd", torch.optim.SGD, DECAY | {"lr": 0.1}),
    ("momentum", torch.optim.SGD, DECAY | {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("momentum", torch.optim.SGD, DECAY | {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("adagrad", torch.optim.Adagrad, DECAY | {"lr": 0.05, "lr_decay": 0.1, "eps": 1e-10}),
]
IDS = ["adamw", "adam", "sgd", "momentum", "nesterov", "adagrad"]


def ulp(values: NDArray[Any]) -> NDArray[Any]:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)


def gradients(step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(step))


def new_operands(rule: str) -> Operands:
    generator = torch.Generator().manual_seed(0)
    return Operands(
        rule=rule,
        parameter=torch.randn(SIZE, generator=generator),
        gradient=torch.zeros(SIZE),
        state={name: torch.zeros(SIZE) for name in RULES[rule]},
    )


def step_ours(operands: Operands, options: dict[str, Any], step: int) -> None:
    operands.gradient = gradients(step)
    scalars = scalars_of(operands.rule, options | {"step": step})
    load_kernels().update(operands, [Range(start=0, stop=SIZE, scalars=scalars)])


def torch_from(operands: Operands, make: Any, options: dict[str, Any], step: int) -> Any:
    """Returns torch's optimizer in the state of `operands` before its step `step`."""
    parameter = torch.nn.Parameter(operands.parameter.clone())
    optimizer = make([parameter], **options)
    state = {name: values.clone() for name, values in operands.state.items()}
    if make is not torch.optim.SGD:
        state["step"] = torch.tensor(float(step - 1))
    if make is torch.optim.Adagrad or step > 1 or make is not torch.optim.SGD:
        optimizer.state[parameter].update(state)
    return optimizer


@pytest.mark.parametrize(("rule", "make", "options"), CASES, ids=IDS)
def test_each_step_from_equal_states_is_within_the_bounds(
    rule: str, make: Any, options: dict[str, Any]
) -> None:
    operands = new_operands(rule)

    for step in range(1, 9):
        optimizer = torch_from(operands, make, options, step)
        (parameter,) = optimizer.param_groups[0]["params"]
        before = {name: values.abs().numpy() for name, values in copied(operands).items()}
        step_ours(operands, options, step)
        parameter.grad = gradients(step)
        optimizer.step()

        # torch may fuse the decay of the gradient, whose rounding then goes through the rest.
        given = gradients(step).abs().numpy() + 0.1 * before["parameter"]
        spread = size_of_update(operands, before, given, options, step)
        larger = np.maximum(before["parameter"], spread)
        off = operands.parameter.double() - parameter.detach().double()
        assert (off.abs().numpy() <= 2 * ulp(larger) + 16 * 2.0**-24 * spread).all(), step
        for name, values in operands.state.items():
            larger = np.maximum(before[name], given**2 if name in SQUARES else given)
            off = values.double() - optimizer.state[parameter][name].double()
            # A square doubles the rounding of the decayed gradient.
            most = 3 if rule == "adamw" or name not in SQUARES else 6
            assert (off.abs().numpy() <= most * ulp(larger)).all(), (step, name)


def copied(operands: Operands) -> dict[str, torch.Tensor]:
    values = {"parameter": operands.parameter, **operands.state}
    return {name: tensor.clone() for name, tensor in values.items()}


def size_of_update(
    operands: Operands,
    before: dict[str, NDArray[Any]],
    given: NDArray[Any],
    options: dict[str, Any],
    step: int,
) -> NDArray[Any]:
    """The change of the weight with every sum taken of absolute values."""
    scalars = scalars_of(operands.rule, options | {"step": step})
    size = given
    for name in ("exp_avg", "momentum_buffer"):
        if name in before:
            size = before[name] + 2 * given
    divisor = np.ones_like(given)
    for name in SQUARES & operands.state.keys():
        root = operands.state[name].sqrt().numpy()
        divisor = root * (scalars.r if name == "exp_avg_sq" else 1) + scalars.e
    update: NDArray[Any] = abs(scalars.u) * size / divisor
    return update


@pytest.mark.parametrize(("rule", "make", "options"), CASES, ids=IDS)
def test_weights_stay_within_1e_5_of_torchs_over_100_steps(
    rule: str, make: Any, options: dict[str, Any]
) -> None:
    operands = new_operands(rule)
    parameter = torch.nn.Parameter(operands.parameter.clone())
    optimizer = make([parameter], **options)

    for step in range(1, 101):
        step_ours(operands, options, step)
        parameter.grad = gradients(step)
        optimizer.step()

    off = (operands.parameter.double() - parameter.detach().double()).norm()
    assert off <= 1e-5 * parameter.detach().double().norm()


@pytest.mark.parametrize(("rule", "make", "options"), CASES, ids=IDS)
def test_special_gradients_give_what_torch_gives(
    rule: str, make: Any, options: dict[str, Any]
) -> None:
    values = [0.0, -0.0, 1e-42, -1e-42, float("inf"), -float("inf"), float("nan"), 3e38]
    special = torch.tensor(values).repeat(SIZE // len(values))
    operands = new_operands(rule)
    operands.gradient = special
    optimizer = torch_from(operands, make, options, 1)
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = special.clone()
    scalars = scalars_of(rule, options | {"step": 1})

    load_kernels().update(operands, [Range(start=0, stop=SIZE, scalars=scalars)])
    optimizer.step()

    found, expected = operands.parameter, parameter.detach()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
