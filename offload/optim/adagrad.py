"""Adagrad over streamed state."""

from collections.abc import Mapping
from typing import Any, ClassVar

from offload.optim.base import Bounds, OffloadOptimizer, Parameters, UpdateEngine
from offload.optim.scalars import Scalars, adagrad_scalars


class Adagrad(OffloadOptimizer):
    """Adagrad as `torch.optim.Adagrad`, over parameters of a wrapped model.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: As in `torch.optim.Adagrad`.
        others: See `OffloadOptimizer`.
    """

    TITLE: ClassVar[str] = "Adagrad"
    BOUNDS: ClassVar[Mapping[str, Bounds]] = {
        "lr": Bounds(),
        "lr_decay": Bounds(),
        "weight_decay": Bounds(),
        "initial_accumulator_value": Bounds(),
        "eps": Bounds(),
    }

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **others: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, engine=engine, defaults=defaults, others=others)

    def rule(self) -> str:
        """Returns `adagrad`."""
        return "adagrad"

    def scalars(self, group: dict[str, Any], step: int) -> Scalars:
        """Returns Adagrad's scalars."""
        return adagrad_scalars(
            lr=float(group["lr"]),
            lr_decay=group["lr_decay"],
            weight_decay=group["weight_decay"],
            initial_accumulator_value=group["initial_accumulator_value"],
            eps=group["eps"],
            step=step,
        )
