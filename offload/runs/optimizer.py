"""Makes the optimizer that a configuration names."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from offload.config.schema import OptimizerConfig
from offload.session import Session


def make_optimizer(session: Session, model: nn.Module, options: OptimizerConfig) -> Optimizer:
    """Returns the optimizer of the wrapped model with the configuration's options."""
    given: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.name in ("adamw", "adam", "lion", "muon"):
        given["betas"] = options.betas
    if options.name in ("adamw", "adam", "adagrad", "muon"):
        given["eps"] = options.eps
    if options.name in ("sgd", "muon"):
        given |= {
            key: value
            for key in ("momentum", "nesterov")
            if (value := getattr(options, key)) is not None
        }
    if options.name == "muon":
        # One learning rate then fits both.
        given["adjust_lr_fn"] = "match_rms_adamw"
    make = {
        "adamw": session.AdamW,
        "adam": session.Adam,
        "adagrad": session.Adagrad,
        "lion": session.Lion,
        "sgd": session.SGD,
        "muon": session.Muon,
    }[options.name]
    optimizer: Optimizer = make(model.parameters(), **given)
    return optimizer
