"""The kernels in plain torch: the fallback without a compiler, and a second opinion in tests.

Only mul, add, sub and div over whole tensors, each of which rounds once, and a square root made
to: never `alpha=`, `value=`, lerp or addc*, which may fuse. So the bits are those of the compiled
kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.optim.codec import canonical, join_master, round_master, split_master
from offload.optim.operands import (
    GRADIENT_DTYPES,
    AdamWOperands,
    AdamWRange,
    check_array,
    check_operands,
    check_ranges,
    gradient_factors,
)
from offload.optim.scalars import AdamWScalars

PIECE_ELEMENTS = 1 << 18
"""Elements worked on at one time: bounds the temporaries to a few MiB."""

NORM_BLOCK_ELEMENTS = 4096
NORM_LANES = 16


class TorchKernels:
    """Kernels of torch operations only."""

    name = "torch"

    @torch.no_grad()
    def adamw(
        self,
        operands: AdamWOperands,
        ranges: Sequence[AdamWRange],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> None:
        """Carries out one AdamW step; see `Kernels.adamw`."""
        check_operands(operands)
        check_ranges(ranges, operands.parameter.numel())
        factors = gradient_factors(gradient_scales)
        for part in ranges:
            for start in range(part.start, part.stop, PIECE_ELEMENTS):
                stop = min(start + PIECE_ELEMENTS, part.stop)
                _update(_piece(operands, start, stop), part.scalars, factors)

    @torch.no_grad()
    def sums_of_squares(
        self, gradients: Sequence[Tensor], *, scales: Sequence[float] = ()
    ) -> list[float]:
        """Returns the float64 sum of squares of each gradient; see `Kernels.sums_of_squares`."""
        for gradient in gradients:
            check_array("gradient", gradient, GRADIENT_DTYPES)
        factors = gradient_factors(scales)
        return [_sum_of_squares(gradient.detach().view(-1), factors) for gradient in gradients]


def _piece(o: AdamWOperands, start: int, stop: int) -> AdamWOperands:
    return AdamWOperands(
        parameter=o.parameter.detach()[start:stop],
        gradient=o.gradient.detach()[start:stop],
        exp_avg=o.exp_avg[start:stop],
        exp_avg_sq=o.exp_avg_sq[start:stop],
        master_low=None if o.master_low is None else o.master_low[start:stop],
        master=None if o.master is None else o.master[start:stop],
    )


def _update(o: AdamWOperands, k: AdamWScalars, factors: tuple[float, ...]) -> None:
    """docs/numerics.md, AdamW: in that order."""
    g = _scaled(o.gradient, factors)
    p = _load_master(o) * k.q
    s = g - o.exp_avg
    if k.c1 < 0.5:
        m = o.exp_avg + s * k.c1
    else:
        # Exact in float64 and in fp32: c1 is in [0.5, 1].
        m = g - s * (1.0 - k.c1)
    v = o.exp_avg_sq * k.b2 + g * k.c2 * g
    d = _sqrt(v) * k.r + k.e
    p = p + m * k.u / d
    o.exp_avg.copy_(canonical(m))
    o.exp_avg_sq.copy_(canonical(v))
    _store_master(o, canonical(p))


def _sqrt(values: Tensor) -> Tensor:
    """Returns the square roots, correctly rounded.

    `torch.sqrt` of fp32 on the CPU is MKL's, off by one ulp for every sixth value. In float64
    four ulp would do: for an fp32 x the root is no nearer to a midpoint y of two fp32 values.
    With y an odd integer of 25 bits, x is even on that scale, so |x - y*y| >= 1 and
    |sqrt(x) - y| >= 1 / (2 * y) >= 2**-26, while an ulp of y in float64 is 2**-28.
    """
    return values.to(torch.float64).sqrt().to(torch.float32)


def _scaled(gradient: Tensor, factors: tuple[float, ...]) -> Tensor:
    g = gradient.to(torch.float32)
    for factor in factors:
        g = g * factor
    return g


def _load_master(o: AdamWOperands) -> Tensor:
    if o.master_low is not None:
        return join_master(o.parameter, o.master_low)
    return o.master if o.master is not None else o.parameter


def _store_master(o: AdamWOperands, master: Tensor) -> None:
    if o.master_low is not None:
        split = split_master(master)
        o.parameter.copy_(split.parameter)
        o.master_low.copy_(split.master_low)
        return
    if o.master is not None:
        o.master.copy_(master)
    # fp16 rounds to nearest even, fp32 is the master itself.
    bf16 = o.parameter.dtype == torch.bfloat16
    o.parameter.copy_(round_master(master) if bf16 else master)


def _sum_of_squares(gradient: Tensor, factors: tuple[float, ...]) -> float:
    total = 0.0
    for start in range(0, gradient.numel(), PIECE_ELEMENTS):
        piece = _scaled(gradient[start : start + PIECE_ELEMENTS], factors)
        # Not `sum()`, which compensates rounding from Python 3.12 on.
        for block in _block_sums(piece):
            total += block
    return total


def _block_sums(values: Tensor) -> list[float]:
    """Returns the sum of each norm block: 16 lanes in order, combined by halving."""
    padding = -values.numel() % NORM_BLOCK_ELEMENTS
    # Adding +0.0 changes no lane: none is -0.0.
    padded = torch.nn.functional.pad(values.to(torch.float64), (0, padding))
    rows = padded.view(-1, NORM_BLOCK_ELEMENTS // NORM_LANES, NORM_LANES)
    lanes = torch.zeros(rows.shape[0], NORM_LANES, dtype=torch.float64)
    for i in range(rows.shape[1]):
        lanes = lanes + rows[:, i] * rows[:, i]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums: list[float] = lanes.view(-1).tolist()
    return sums
