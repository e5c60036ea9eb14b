"""The kernels in plain torch: the fallback without a compiler, and a second opinion in tests.

Only mul, add, sub and div over whole tensors, each of which rounds once, and a square root made
to: never `alpha=`, `value=`, lerp or addc*, which may fuse. So the bits are those of the compiled
kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.optim.codec import canonical, join_master, round_master, split_master
from offload.optim.operands import (
    GRADIENT_DTYPES,
    Operands,
    Range,
    Statistics,
    check_accumulation,
    check_array,
    check_operands,
    check_ranges,
    gradient_factors,
)
from offload.optim.scalars import Scalars

PIECE_ELEMENTS = 1 << 18
"""Elements worked on at one time: bounds the temporaries to a few MiB. Whole norm blocks."""

NORM_BLOCK_ELEMENTS = 4096
NORM_LANES = 16


class TorchKernels:
    """Kernels of torch operations only."""

    name = "torch"

    def update(
        self,
        operands: Operands,
        ranges: Sequence[Range],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> None:
        """Carries out one step; see `Kernels.update`."""
        self.prepare(operands)(ranges, gradient_scales=gradient_scales)

    def prepare(self, operands: Operands) -> "TorchUpdate":
        """Checks the operands once; see `Kernels.prepare`."""
        check_operands(operands)
        return TorchUpdate(operands)

    @torch.no_grad()
    def measured_update(
        self,
        operands: Operands,
        ranges: Sequence[Range],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> list[Statistics]:
        """Carries out one step and says what it found; see `Kernels.measured_update`."""
        check_operands(operands)
        check_ranges(ranges, operands.parameter.numel())
        factors = gradient_factors(gradient_scales)
        return [_measured(_piece(operands, r.start, r.stop), r.scalars, factors) for r in ranges]

    @torch.no_grad()
    def sums_of_squares(
        self, gradients: Sequence[Tensor], *, scales: Sequence[float] = ()
    ) -> list[float]:
        """Returns the float64 sum of squares of each gradient; see `Kernels.sums_of_squares`."""
        for gradient in gradients:
            check_array("gradient", gradient, GRADIENT_DTYPES)
        factors = gradient_factors(scales)
        return [_sum_of_squares(gradient.detach().view(-1), factors) for gradient in gradients]

    @torch.no_grad()
    def count_nonfinite(self, gradients: Sequence[Tensor]) -> list[int]:
        """Returns how many elements are infinite or NaN; see `Kernels.count_nonfinite`."""
        for gradient in gradients:
            check_array("gradient", gradient, GRADIENT_DTYPES)
        return [_count_nonfinite(gradient.detach().view(-1)) for gradient in gradients]

    @torch.no_grad()
    def accumulate(self, accumulator: Tensor, gradient: Tensor) -> None:
        """Adds a gradient; see `Kernels.accumulate`."""
        check_accumulation(accumulator, gradient)
        into, added = accumulator.detach().view(-1), gradient.detach().view(-1)
        for start in range(0, into.numel(), PIECE_ELEMENTS):
            piece = into[start : start + PIECE_ELEMENTS]
            total = piece.float() + added[start : start + PIECE_ELEMENTS].float()
            # Rounded to nearest even; torch's own NaN depends on vector and tail.
            piece.copy_(canonical(total.to(piece.dtype)))


class TorchUpdate:
    """The update of some operands; see `PreparedUpdate`."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands

    @torch.no_grad()
    def __call__(self, ranges: Sequence[Range], *, gradient_scales: Sequence[float] = ()) -> None:
        """Carries out one step."""
        operands = self._operands
        check_ranges(ranges, operands.parameter.numel())
        factors = gradient_factors(gradient_scales)
        for part in ranges:
            for start in range(part.start, part.stop, PIECE_ELEMENTS):
                stop = min(start + PIECE_ELEMENTS, part.stop)
                _update(_piece(operands, start, stop), part.scalars, factors)


@dataclass(slots=True, kw_only=True)
class _Step:
    """One piece's values in fp32: what a rule reads and changes."""

    p: Tensor
    g: Tensor
    state: dict[str, Tensor]


def _piece(o: Operands, start: int, stop: int) -> Operands:
    part = o.part(start, stop)
    part.parameter, part.gradient = part.parameter.detach(), part.gradient.detach()
    return part


def _update(o: Operands, k: Scalars, factors: tuple[float, ...]) -> None:
    """docs/numerics.md: in that order."""
    at = _Step(p=load_master(o), g=scaled_gradient(o.gradient, factors), state=dict(o.state))
    if o.rule not in ("adamw", "lion") and k.w != 0.0:
        at.g = at.g + at.p * k.w
    _UPDATES[o.rule](at, k)
    for name, values in at.state.items():
        o.state[name].copy_(canonical(values))
    store_master(o, canonical(at.p))


def _adamw(at: _Step, k: Scalars) -> None:
    at.p = at.p * k.q
    _adam(at, k)


def _adam(at: _Step, k: Scalars) -> None:
    s = at.g - at.state["exp_avg"]
    if k.c1 < 0.5:
        m = at.state["exp_avg"] + s * k.c1
    else:
        # Exact in float64 and in fp32: c1 is in [0.5, 1].
        m = at.g - s * (1.0 - k.c1)
    v = at.state["exp_avg_sq"] * k.b2 + at.g * k.c2 * at.g
    d = _sqrt(v) * k.r + k.e
    at.p = at.p + m * k.u / d
    at.state = {"exp_avg": m, "exp_avg_sq": v}


def _lion(at: _Step, k: Scalars) -> None:
    m = at.state["exp_avg"]
    s = m * k.b1 + at.g * k.c1
    at.p = at.p * k.q + s.sign() * k.u
    at.state = {"exp_avg": m * k.b2 + at.g * k.c2}


def _sgd(at: _Step, k: Scalars) -> None:
    at.p = at.p + at.g * k.u


def _momentum(at: _Step, k: Scalars) -> None:
    m = at.state["momentum_buffer"] * k.b1 + at.g * k.c1
    n = at.g + m * k.b1 if k.is_nesterov else m
    at.p = at.p + n * k.u
    at.state = {"momentum_buffer": m}


def _adagrad(at: _Step, k: Scalars) -> None:
    v = (at.state["sum"] + k.a) + at.g * at.g
    d = _sqrt(v) + k.e
    at.p = at.p + at.g * k.u / d
    at.state = {"sum": v}


_UPDATES: dict[str, Callable[[_Step, Scalars], None]] = {
    "adamw": _adamw,
    "adam": _adam,
    "lion": _lion,
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
}


def _sqrt(values: Tensor) -> Tensor:
    """Returns the square roots, correctly rounded.

    `torch.sqrt` of fp32 on the CPU is MKL's, off by one ulp for every sixth value. In float64
    four ulp would do: for an fp32 x the root is no nearer to a midpoint y of two fp32 values.
    With y an odd integer of 25 bits, x is even on that scale, so |x - y*y| >= 1 and
    |sqrt(x) - y| >= 1 / (2 * y) >= 2**-26, while an ulp of y in float64 is 2**-28.
    """
    return values.to(torch.float64).sqrt().to(torch.float32)


def scaled_gradient(gradient: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Returns the gradient in fp32, times each of the factors in order."""
    g = gradient.to(torch.float32)
    for factor in factors:
        g = g * factor
    return g


def load_master(o: Operands) -> Tensor:
    """Returns the fp32 master, joined from its halves where it is split."""
    if o.master_low is not None:
        return join_master(o.parameter, o.master_low)
    return o.master if o.master is not None else o.parameter


def store_master(o: Operands, master: Tensor) -> None:
    """Writes an fp32 master, its NaN canonical, and the parameter that it rounds to."""
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


def _measured(o: Operands, k: Scalars, factors: tuple[float, ...]) -> Statistics:
    gradient = update = parameter = 0.0
    num_nonfinite = 0
    for start in range(0, o.parameter.numel(), PIECE_ELEMENTS):
        piece = o.part(start, min(start + PIECE_ELEMENTS, o.parameter.numel()))
        gradient = _add_blocks(gradient, scaled_gradient(piece.gradient, factors))
        num_nonfinite += _count_nonfinite(piece.gradient)
        old = load_master(piece).clone()
        _update(piece, k, factors)
        new = load_master(piece)
        update = _add_blocks(update, new - old)
        parameter = _add_blocks(parameter, new)
    return Statistics(
        gradient=gradient, update=update, parameter=parameter, num_nonfinite=num_nonfinite
    )


def _count_nonfinite(values: Tensor) -> int:
    return values.numel() - int(values.isfinite().sum())


def _sum_of_squares(gradient: Tensor, factors: tuple[float, ...]) -> float:
    total = 0.0
    for start in range(0, gradient.numel(), PIECE_ELEMENTS):
        total = _add_blocks(
            total, scaled_gradient(gradient[start : start + PIECE_ELEMENTS], factors)
        )
    return total


def _add_blocks(total: float, values: Tensor) -> float:
    # Not `sum()`, which compensates rounding from Python 3.12 on.
    for block in _block_sums(values):
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
