"""The scalars of a step: float64, rounded once."""

import numpy as np
import pytest

from offload.errors import ConfigError
from offload.optim.scalars import adamw_scalars

OPTIONS = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_scalars_are_rounded_once_from_float64() -> None:
    k = adamw_scalars(**OPTIONS, step=3)

    assert k.c1 == float(np.float32(1 - 0.9))
    assert k.c2 == float(np.float32(1 - 0.95))
    assert k.b2 == float(np.float32(0.95))
    assert k.q == float(np.float32(1 - 6e-4 * 0.1))
    assert k.u == float(np.float32(-(6e-4 / (1 - 0.9**3))))
    assert k.r == float(np.float32(1 / (1 - 0.95**3) ** 0.5))
    assert k.e == float(np.float32(1e-8))


def test_a_learning_rate_beyond_fp32_is_an_infinite_step() -> None:
    assert adamw_scalars(**OPTIONS | {"lr": 1e300}, step=1).u == -float("inf")


@pytest.mark.parametrize(
    "wrong", [{"step": 0}, {"step": 1, "betas": (1.0, 0.9)}, {"step": 1, "betas": (0.9, -0.1)}]
)
def test_wrong_scalars_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="AdamW's scalars"):
        adamw_scalars(**OPTIONS | wrong)
