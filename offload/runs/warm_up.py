"""Brings up what every process pays once: kernels, thread pools, their workspaces."""

import torch

from offload.config import Config
from offload.runs.gpt import GPT, GPTShape
from offload.runs.model import gpt_shape

_MAX_WIDTH = 1024
"""Above it the block would no longer be small against a budget of some hundred MiB."""
_WIDTH = 64
"""Of the block that stands in for a model of the user's, whose width is not known."""


def warm_up(config: Config) -> None:
    """Runs forward and backward of one block with the run's dtype, batch and context.

    A built-in model's block has the run's width too, as libraries keep workspaces and generated
    code by shape. The generator's state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        model = GPT(_one_block(config))
        tokens = torch.zeros((config.train.batch, config.model.context), dtype=torch.int64)
        model(tokens, tokens).backward()


def _one_block(config: Config) -> GPTShape:
    shape = gpt_shape(config.model)
    is_own = config.model.factory is None and shape.width <= _MAX_WIDTH
    return GPTShape(
        layers=1,
        width=shape.width if is_own else _WIDTH,
        heads=shape.heads if is_own else 1,
        context=shape.context,
        vocabulary=256,
        dtype=shape.dtype,
    )
