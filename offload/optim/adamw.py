"""AdamW over streamed state."""

from collections.abc import Mapping
from typing import Any, ClassVar

from offload.optim.base import Bounds, OffloadOptimizer, Parameters, UpdateEngine
from offload.optim.scalars import Scalars, adamw_scalars


class AdamW(OffloadOptimizer):
    """AdamW with decoupled weight decay, in fp32, over parameters of a wrapped model.

    The arithmetic is `torch.optim.AdamW`'s, operation by operation, with a product by the
    reciprocal where torch divides by the bias correction. Made by `Session.AdamW`.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        lr, betas, eps, weight_decay: As in `torch.optim.AdamW`.
        others: See `OffloadOptimizer`.
    """

    TITLE: ClassVar[str] = "AdamW"
    BOUNDS: ClassVar[Mapping[str, Bounds]] = {
        "lr": Bounds(),
        "betas": Bounds(below=1.0),
        "eps": Bounds(),
        "weight_decay": Bounds(),
    }

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **others: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, engine=engine, defaults=defaults, others=others)

    def rule(self) -> str:
        """Returns `adamw`."""
        return "adamw"

    def scalars(self, group: dict[str, Any], step: int) -> Scalars:
        """Returns AdamW's scalars."""
        return adamw_scalars(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
        )
