"""Optimizers other than AdamW, over an untouched module in memory."""

import struct

import numpy as np
import torch
import xxhash
from parity.oracle import CODES, Reference, from_master, to_fp32

from offload.layout import RULES
from offload.testing import kernel_oracle

BETAS = {"betas": (0.9, 0.95), "eps": 1e-8}
RULE_CASES = [
    ("Adam", "adam", BETAS | {"lr": 0.01, "weight_decay": 0.1}),
    ("Lion", "lion", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    ("SGD", "sgd", {"lr": 0.1, "weight_decay": 0.01}),
    (
        "SGD",
        "momentum",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": True},
    ),
    (
        "Adagrad",
        "adagrad",
        {
            "lr": 0.05,
            "lr_decay": 0.1,
            "weight_decay": 0.01,
            "initial_accumulator_value": 0.5,
            "eps": 1e-10,
        },
    ),
]
RULE_IDS = [rule for _, rule, _ in RULE_CASES]


class RuleReference(Reference):
    """An untouched module, and one of the rules over it."""

    def __init__(self, model, rule, options):
        super().__init__(model)
        self.rule, self.options = rule, options
        self.states = {
            name: {key: np.zeros_like(master) for key in RULES[rule]}
            for name, master in self.masters.items()
        }

    def _update(self, name, parameter):
        self.steps[name] += 1
        after = kernel_oracle.update(
            self.rule,
            kernel_oracle.OracleState(master=self.masters[name], state=self.states[name]),
            to_fp32(parameter.grad),
            self.options | {"step": self.steps[name]},
        )
        self.masters[name], self.states[name] = after.master, after.state
        with torch.no_grad():
            values = from_master(after.master, parameter.dtype)
            parameter.copy_(values.view(parameter.shape))

    def digest(self):
        digest = xxhash.xxh3_128()
        for name, parameter in self.parameters.items():
            shape = tuple(parameter.shape)
            digest.update(name.encode() + b"\0" + CODES[parameter.dtype] + b"\0")
            digest.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy())
            digest.update(struct.pack("<Q", self.steps[name]))
            digest.update(self.masters[name].tobytes())
            for key in sorted(self.states[name]):
                digest.update(key.encode() + b"\0" + self.states[name][key].tobytes())
        digest.update(struct.pack("<Q", self.completed_steps))
        return digest.hexdigest()
