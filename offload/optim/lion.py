"""Lion over streamed state."""

from collections.abc import Mapping
from typing import Any, ClassVar

from offload.optim.base import Bounds, OffloadOptimizer, Parameters, UpdateEngine
from offload.optim.scalars import Scalars, lion_scalars


class Lion(OffloadOptimizer):
    """Lion: steps of the sign of interpolated momentum, decoupled weight decay.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        lr, betas, weight_decay: As in the paper.
        others: See `OffloadOptimizer`.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675,
    algorithm 2.
    """

    TITLE: ClassVar[str] = "Lion"
    BOUNDS: ClassVar[Mapping[str, Bounds]] = {
        "lr": Bounds(),
        "betas": Bounds(below=1.0),
        "weight_decay": Bounds(),
    }

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, engine=engine, defaults=defaults, others=others)

    def rule(self) -> str:
        """Returns `lion`."""
        return "lion"

    def scalars(self, group: dict[str, Any], step: int) -> Scalars:
        """Returns Lion's scalars, the same in every step."""
        del step
        return lion_scalars(
            lr=float(group["lr"]), betas=group["betas"], weight_decay=group["weight_decay"]
        )
