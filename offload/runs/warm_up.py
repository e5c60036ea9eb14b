"""Brings up what every process pays once: kernels, thread pools, their workspaces."""

import torch

from offload.config import Config
from offload.errors import PlanError
from offload.runs.gpt import GPT, GPTShape

_WIDTH = 64


def warm_up(config: Config) -> None:
    """Runs forward and backward of one small block in the run's dtype, batch and context.

    The generator's state is left as it was.

    Raises:
        PlanError: There is no memory for its activations: none for those of a larger model.
    """
    try:
        _run_block(config)
    except (MemoryError, RuntimeError) as error:  # which torch raises for both
        text = str(error)
        if isinstance(error, RuntimeError) and "allocate memory" not in text:
            raise
        raise PlanError(
            "the run does not fit this machine's memory: expected room for the activations of one "
            f"small block with `train.batch` {config.train.batch} and `model.context` "
            f"{config.model.context}, found: {text or 'no memory'}; lower one of them"
        ) from error


def _run_block(config: Config) -> None:
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
