"""SGD over streamed state."""

from collections.abc import Mapping
from typing import Any, ClassVar

from offload.errors import ConfigError
from offload.optim.base import Bounds, OffloadOptimizer, Parameters, UpdateEngine
from offload.optim.scalars import Scalars, sgd_scalars


class SGD(OffloadOptimizer):
    """SGD as `torch.optim.SGD`, with (Nesterov) momentum if any param_group asks for it.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        lr, momentum, dampening, weight_decay, nesterov: As in `torch.optim.SGD`.
        others: See `OffloadOptimizer`.
    """

    TITLE: ClassVar[str] = "SGD"
    BOUNDS: ClassVar[Mapping[str, Bounds]] = {
        "lr": Bounds(),
        "momentum": Bounds(),
        "dampening": Bounds(),
        "weight_decay": Bounds(),
    }

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **others: Any,
    ) -> None:
        self._rule: str | None = None
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, engine=engine, defaults=defaults, others=others)
        self._rule = self.rule()

    def rule(self) -> str:
        """Returns `momentum` if any param_group has momentum, else `sgd`."""
        return "momentum" if any(g["momentum"] for g in self.param_groups) else "sgd"

    def scalars(self, group: dict[str, Any], step: int) -> Scalars:
        """Returns the scalars of SGD."""
        if group["momentum"] and self._rule == "sgd":
            self._refuse_momentum(group)
        return sgd_scalars(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"] if group["momentum"] else 0.0,
            weight_decay=group["weight_decay"],
            nesterov=bool(group["nesterov"] and group["momentum"]),
            step=step,
        )

    def _check_options(self, group: dict[str, Any]) -> None:
        super()._check_options(group)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ConfigError(
                "cannot make SGD with `nesterov`: expected `momentum` above 0 and `dampening` 0, "
                f"found {group['momentum']} and {group['dampening']}; correct one of them"
            )
        if group["momentum"] and self._rule == "sgd":
            self._refuse_momentum(group)

    def _refuse_momentum(self, group: dict[str, Any]) -> None:
        raise ConfigError(
            f"cannot use `momentum` = {group['momentum']}: the optimizer was made without, and "
            "its state has no `momentum_buffer`; make it with momentum in one param_group"
        )
