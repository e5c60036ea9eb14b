"""Brings up what every process pays once: kernels, thread pools, their workspaces."""

import torch

from offload.config import Config
from offload.runs.gpt import GPT, GPTShape

_WIDTH = 64


def warm_up(config: Config) -> None:
    """Runs forward and backward of one small block in the run's dtype, batch and context.

    The generator's state is left as it was.
    """
    shape = GPTShape(
        layers=1,
        width=_WIDTH,
        heads=1,
        context=config.model.context,
        vocabulary=256,
        dtype=getattr(torch, config.model.dtype),
    )
    with torch.random.fork_rng(devices=[]):
        model = GPT(shape)
        tokens = torch.zeros((config.train.batch, config.model.context), dtype=torch.int64)
        model(tokens, tokens).backward()
