"""Estimates the passes of a model: operations counted over the rates of a machine.

Nothing of the model is built but its shapes. What an operation costs beside its arithmetic and
its bytes is not in it, nor that products of other sizes reach other rates: an estimate, where a
probe is a measurement.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from offload.config import Config
from offload.plan.work import ModelPasses, PassTimes
from offload.runs.model import build_meta_model
from offload.runs.operation_count import PassCount, count_passes

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 5
_ENOUGH_S = 0.3
"""Of one product: no round beyond the least begins after that."""
_MOST_FEATURES = 4096
"""Of the matrix that is multiplied: larger ones reach no other rate."""


def estimate_passes(
    config: Config, units: Sequence[str], *, gradient_bytes: int, copy_bytes_per_s: float
) -> ModelPasses:
    """Returns how long a micro-step takes on the CPU.

    Args:
        config: Of the run.
        units: Their names: the modules' own.
        gradient_bytes: Read for the norm, once a step.
        copy_bytes_per_s: Of copies in memory.

    Raises:
        Exception: The model's passes need values, or whatever else it raises on the meta device.
    """
    model = build_meta_model(config.model)
    tokens = torch.zeros(
        (config.train.batch, config.model.context), dtype=torch.int64, device="meta"
    )
    forward, backward = count_passes(model, tokens, tokens)
    rates = _product_rates(model, rows=tokens.numel())
    forwards, backwards = (
        _by_unit(count, units, rate, copy_bytes_per_s)
        for count, rate in zip((forward, backward), rates, strict=True)
    )
    return ModelPasses(
        units=tuple(
            PassTimes(forward_s=f, backward_s=b) for f, b in zip(forwards, backwards, strict=True)
        ),
        other_s=gradient_bytes / copy_bytes_per_s if config.train.max_grad_norm else 0.0,
    )


def _by_unit(
    count: PassCount, units: Sequence[str], flops_per_s: float, copy_bytes_per_s: float
) -> list[float]:
    """Products take their time where they are; what is in no unit is the last one's."""
    times = [count.flops_of.get(name, 0) / flops_per_s for name in units]
    total_s = count.flops / flops_per_s + count.moved_bytes / copy_bytes_per_s
    elsewhere_s = max(total_s - sum(times), 0.0)
    moved_s = min(count.moved_bytes / copy_bytes_per_s, elsewhere_s)
    spread = [s + moved_s * s / sum(times) if sum(times) else 0.0 for s in times]
    spread[-1] += max(total_s - sum(spread), 0.0)
    return spread


def _product_rates(model: nn.Module, *, rows: int) -> tuple[float, float]:
    """Returns FLOP/s of forward and of backward of the model's largest linear layer."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    largest = max(weights, key=lambda w: w.numel(), default=torch.empty(512, 512, device="meta"))
    features = [min(size, _MOST_FEATURES) for size in largest.shape]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(features, generator=generator).to(largest.dtype)
    inputs = torch.randn((rows, features[1]), generator=generator).to(largest.dtype)
    outputs = inputs @ weight.T
    flops = 2 * rows * weight.numel()
    return (
        flops / _least_s(lambda: nn.functional.linear(inputs, weight)),
        2 * flops / _least_s(lambda: (outputs @ weight, outputs.T @ inputs)),
    )


def _least_s(run: Callable[[], object]) -> float:
    """Returns the shortest of some rounds: other programs only make them longer."""
    run()
    times: list[float] = []
    while len(times) < _LEAST_ROUNDS or (len(times) < _MOST_ROUNDS and sum(times) < _ENOUGH_S):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return max(min(times), 1e-9)
