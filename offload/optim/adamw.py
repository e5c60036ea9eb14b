"""AdamW as a `torch.optim.Optimizer` whose state lives in the tiered store."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, overload

import torch
from torch import nn

from offload.errors import ConfigError, StoreError
from offload.optim.gradient import Accumulator
from offload.optim.pipeline import ParameterUpdate
from offload.optim.scalars import adamw_scalars

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class UpdateEngine(Protocol):
    """What an optimizer asks of the session that keeps its state."""

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Returns the name under which the engine keeps `parameter`, or None."""
        ...

    def accumulator_of(self, parameter: nn.Parameter) -> Accumulator | None:
        """Returns the gradient to apply, or None if the parameter has none in this step."""
        ...

    def step_of(self, name: str) -> int:
        """Returns how many updates the parameter has had."""
        ...

    def apply(self, updates: dict[str, ParameterUpdate]) -> None:
        """Updates the named parameters and counts one completed optimizer step."""
        ...


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, in fp32, over parameters of a wrapped model.

    The arithmetic is `torch.optim.AdamW`'s, operation by operation, with a product by the
    reciprocal where torch divides by the bias correction; `docs/numerics.md` says which. A
    parameter without a gradient is not touched: no decay, no step. Made by `Session.AdamW`.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        lr, betas, eps, weight_decay: As in `torch.optim.AdamW`; may differ by param_group and
            be edited between steps.

    Raises:
        ConfigError: A value is out of range, an option of torch's that this one lacks is asked
            for, or a parameter does not belong to a wrapped model.
    """

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **unknown: object,
    ) -> None:
        if unknown:
            raise ConfigError(_unknown_option(min(unknown)))
        self._engine = engine
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of a wrapped model with options of their own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for index, parameter in enumerate(group["params"]):
                if self._engine.name_of(parameter) is None:
                    raise ConfigError(
                        f"cannot optimise parameter {index} of param_group "
                        f"{len(self.param_groups) - 1}, shape {tuple(parameter.shape)}: expected "
                        "a parameter of a wrapped model, found another tensor; call "
                        "`session.wrap(model)` first and pass `model.parameters()` after it"
                    )
        except ConfigError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient; returns what `closure` returned."""
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: dict[str, ParameterUpdate] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                name = self._engine.name_of(parameter)
                accumulator = self._engine.accumulator_of(parameter)
                if name is not None and accumulator is not None:
                    updates[name] = ParameterUpdate(
                        scalars=adamw_scalars(
                            lr=float(group["lr"]),
                            betas=group["betas"],
                            eps=group["eps"],
                            weight_decay=group["weight_decay"],
                            step=self._engine.step_of(name) + 1,
                        ),
                        scales=tuple(accumulator.scales),
                    )
        self._engine.apply(updates)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Refuses: the state is in the store, and a copy without it would resume wrongly."""
        raise StoreError(
            "cannot copy the optimizer state into a `state_dict`: it lives in the session's "
            "store; save with `session.commit(metadata=...)` and resume by opening the session "
            "on the same paths"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses, as `state_dict` does."""
        del state_dict
        raise StoreError(
            "cannot load a `state_dict` into an optimizer whose state lives in the session's "
            "store; open the session on the store of the run to resume"
        )


def _check_options(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    checks = (
        ("lr", float(group["lr"]), float(group["lr"]) >= 0, "0 or more"),
        ("eps", group["eps"], group["eps"] >= 0, "0 or more"),
        ("betas[0]", beta1, 0 <= beta1 < 1, "between 0 and 1, 1 excluded"),
        ("betas[1]", beta2, 0 <= beta2 < 1, "between 0 and 1, 1 excluded"),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, "0 or more"),
    )
    for name, value, is_right, expected in checks:
        if not is_right:
            raise ConfigError(
                f"cannot make AdamW with `{name}` = {value}: expected {expected}; correct `{name}`"
            )
    known = {"params", "param_names", "lr", "betas", "eps", "weight_decay", "initial_lr"}
    unknown = sorted(group.keys() - known)
    if unknown:
        raise ConfigError(_unknown_option(unknown[0]))


def _unknown_option(name: str) -> str:
    return (
        f"cannot make AdamW with option `{name}`: expected some of `lr`, `betas`, `eps`, "
        f"`weight_decay`, found `{name}`; leave it out"
    )
