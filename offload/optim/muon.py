"""Muon for whole matrices, AdamW for the rest, over streamed state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.optim.base import Bounds, OffloadOptimizer, Parameters, UpdateEngine
from offload.optim.scalars import Scalars, adamw_scalars
from offload.optim.whole import WholeUpdate

LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(OffloadOptimizer):
    """Muon as `torch.optim.Muon` over the matrices of the layout, AdamW over all other parameters.

    The session must have been made with `optimizer="muon"`: matrices are laid out apart, each a
    subgroup of its own.

    Args:
        params: Parameters, (name, parameter) pairs or param_groups of a wrapped model.
        engine: Keeps the state and applies the updates.
        lr, weight_decay: Of both.
        momentum, nesterov, ns_coefficients, ns_steps, ns_eps, adjust_lr_fn: Of the matrices, as
            in `torch.optim.Muon`, which calls `ns_eps` eps.
        adamw_lr_scale: The other parameters' learning rate is `lr` times this.
        betas, eps: Of the other parameters.
        device: Where matrices are updated.
        others: See `OffloadOptimizer`.

    Source: https://kellerjordan.github.io/posts/muon/
    """

    TITLE: ClassVar[str] = "Muon"
    TAKES_WHOLE: ClassVar[bool] = True
    BOUNDS: ClassVar[Mapping[str, Bounds]] = {
        "lr": Bounds(),
        "weight_decay": Bounds(),
        "momentum": Bounds(below=1.0),
        "ns_steps": Bounds(below=100),
        "ns_eps": Bounds(),
        "adamw_lr_scale": Bounds(),
        "betas": Bounds(below=1.0),
        "eps": Bounds(),
    }

    def __init__(
        self,
        params: Parameters,
        *,
        engine: UpdateEngine,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        adjust_lr_fn: str | None = None,
        adamw_lr_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        device: str | torch.device = "cpu",
        **others: Any,
    ) -> None:
        self._device = torch.device(device)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "ns_steps": ns_steps,
            "ns_eps": ns_eps,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_lr_scale": adamw_lr_scale,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(params, engine=engine, defaults=defaults, others=others)

    def rule(self) -> str:
        """Returns `adamw`: the rule of what is not a matrix."""
        return "adamw"

    def scalars(self, group: dict[str, Any], step: int) -> Scalars:
        """Returns AdamW's scalars."""
        return adamw_scalars(
            lr=float(group["lr"]) * group["adamw_lr_scale"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
        )

    def whole_update(self, group: dict[str, Any]) -> WholeUpdate:
        """Returns Muon's update with the group's options."""
        return MuonUpdate(
            device=self._device,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            ns_coefficients=group["ns_coefficients"],
            ns_steps=group["ns_steps"],
            ns_eps=group["ns_eps"],
            adjust_lr_fn=group["adjust_lr_fn"],
        )

    def _check_options(self, group: dict[str, Any]) -> None:
        super()._check_options(group)
        if group["adjust_lr_fn"] not in LR_ADJUSTMENTS:
            raise ConfigError(
                f"cannot make Muon with `adjust_lr_fn` = {group['adjust_lr_fn']}: expected "
                '`"original"`, `"match_rms_adamw"` or None; correct it'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonUpdate:
    """Muon's update of one matrix. See [Note: whole-matrix updates]."""

    device: torch.device
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    ns_eps: float
    adjust_lr_fn: str | None

    def __call__(self, master: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Returns the new master; `momentum_buffer` is updated in place."""
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(buffer, self.momentum) if self.nesterov else buffer
        update = self._orthogonalised(update)
        decayed = master * (1 - self.lr * self.weight_decay)
        return decayed.add(update, alpha=-self._adjusted_lr(*master.shape))

    def _orthogonalised(self, update: Tensor) -> Tensor:
        """Returns about U V' of the update U S V': Newton-Schulz in bf16, as torch does."""
        a, b, c = self.ns_coefficients
        is_tall = update.size(0) > update.size(1)
        x = update.bfloat16()
        x = x.T if is_tall else x
        # The spectral norm is then at most 1.
        x = x / x.norm().clamp(min=self.ns_eps)
        for _ in range(self.ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if is_tall else x

    def _adjusted_lr(self, num_rows: int, num_columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * 0.2 * math.sqrt(max(num_rows, num_columns))
        return self.lr * math.sqrt(max(1, num_rows / num_columns))
