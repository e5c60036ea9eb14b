"""Makes the optimizer that a configuration names."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from offload.config.schema import OptimizerConfig
from offload.config.supported import OPTIMIZER_OPTIONS
from offload.session import Session


def make_optimizer(session: Session, model: nn.Module, options: OptimizerConfig) -> Optimizer:
    """Returns the optimizer of the wrapped model with the configuration's options."""
    given: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    given |= {
        key: value
        for key in OPTIMIZER_OPTIONS[options.name]
        # `matrices` are those of the model's layout.
        if key != "matrices" and (value := getattr(options, key)) is not None
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
