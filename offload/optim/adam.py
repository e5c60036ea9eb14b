"""Adam over streamed state."""

from typing import Any, ClassVar

from offload.optim.adamw import AdamW
from offload.optim.base import Parameters, UpdateEngine
from offload.optim.scalars import Scalars, adam_scalars


class Adam(AdamW):
    """Adam as `torch.optim.Adam`: weight decay goes into the gradient (L2), by default none.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        lr, betas, eps, weight_decay: As in `torch.optim.Adam`.
        others: See `OffloadOptimizer`.
    """

    TITLE: ClassVar[str] = "Adam"

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(
            params,
            engine=engine,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            **others,
        )

    def rule(self) -> str:
        """Returns `adam`."""
        return "adam"

    def scalars(self, group: dict[str, Any], step: int) -> Scalars:
        """Returns Adam's scalars."""
        return adam_scalars(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
        )
