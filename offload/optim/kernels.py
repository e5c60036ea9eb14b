"""The optimizer kernels by name, and which of them is best here."""

import functools
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from offload._native import optim as native
from offload._native.cpus import usable_cpus
from offload.errors import ConfigError
from offload.optim.operands import (
    GRADIENT_DTYPES,
    AdamWOperands,
    AdamWRange,
    check_array,
    check_operands,
    check_ranges,
    gradient_factors,
)
from offload.optim.reference import TorchKernels
from offload.optim.scalars import AdamWScalars, adamw_scalars

__all__ = [
    "AdamWOperands",
    "AdamWRange",
    "AdamWScalars",
    "Kernels",
    "NativeKernels",
    "TorchKernels",
    "adamw_scalars",
    "kernel_names",
    "load_kernels",
]

_logger = logging.getLogger("offload.optim")


class Kernels(Protocol):
    """The arithmetic of docs/numerics.md; every implementation gives the same bits.

    Concurrency: Any thread; calls of several threads take turns. The GIL is released.
    """

    @property
    def name(self) -> str:
        """`avx512`, `avx2`, `scalar` or `torch`."""

    def adamw(
        self,
        operands: AdamWOperands,
        ranges: Sequence[AdamWRange],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> None:
        """Carries out one AdamW step over `ranges`, in place.

        Args:
            operands: One subgroup's tensors. Autograd's version counters are left alone.
            ranges: Ascending, without overlap; elements in none are not touched.
            gradient_scales: At most two factors, multiplied one after the other in fp32 onto the
                unrounded gradient; one of exactly 1 is left out.

        Raises:
            ConfigError: An operand or a range is wrong; nothing was written.
        """

    def sums_of_squares(
        self, gradients: Sequence[Tensor], *, scales: Sequence[float] = ()
    ) -> list[float]:
        """Returns the float64 sum of squares of each parameter's gradient, in blocks.

        Args:
            gradients: Each one parameter's, contiguous, on the CPU, of any shape.
            scales: As `gradient_scales` of `adamw`.

        Raises:
            ConfigError: A gradient is not a plain array on the CPU.
        """


class NativeKernels:
    """The compiled kernels of one variant, on `num_threads` threads of the library's own.

    float16 parameters and gradients have no compiled kernel: the torch reference takes them.
    """

    def __init__(self, variant: str, *, num_threads: int) -> None:
        self.name = variant
        self.num_threads = num_threads
        self._reference = TorchKernels()

    def adamw(
        self,
        operands: AdamWOperands,
        ranges: Sequence[AdamWRange],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> None:
        """Carries out one AdamW step; see `Kernels.adamw`."""
        if torch.float16 in (operands.parameter.dtype, operands.gradient.dtype):
            self._reference.adamw(operands, ranges, gradient_scales=gradient_scales)
            return
        check_operands(operands)
        check_ranges(ranges, operands.parameter.numel())
        arrays = _arrays(operands, _two_factors(gradient_scales))
        native.adamw(self.name, arrays, ranges, num_threads=self.num_threads)

    def sums_of_squares(
        self, gradients: Sequence[Tensor], *, scales: Sequence[float] = ()
    ) -> list[float]:
        """Returns the float64 sum of squares of each gradient; see `Kernels.sums_of_squares`."""
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            return self._reference.sums_of_squares(gradients, scales=scales)
        for gradient in gradients:
            check_array("gradient", gradient, GRADIENT_DTYPES)
        arrays = [
            native.GradientArray(address=g.data_ptr(), num_elements=g.numel(), dtype=_dtype_name(g))
            for g in gradients
        ]
        return native.sums_of_squares(
            self.name, arrays, scales=_two_factors(scales), num_threads=self.num_threads
        )


def kernel_names() -> tuple[str, ...]:
    """Returns the names that `load_kernels` takes here, the best first."""
    return (*native.variants(), "torch") if native.available() else ("torch",)


def load_kernels(name: str = "auto", *, num_threads: int | None = None) -> Kernels:
    """Returns the kernels called `name`; `auto` is the best that run here.

    Args:
        name: `auto`, `avx512`, `avx2`, `scalar` or `torch`.
        num_threads: Threads of compiled kernels; by default the CPUs that the process may use.

    Raises:
        ConfigError: The name is unknown, or does not run here or is disabled by
            `OFFLOAD_DISABLE_CPU_FEATURES` or `OFFLOAD_PURE`.
    """
    names = kernel_names()
    chosen = names[0] if name == "auto" else name
    if chosen not in names:
        reason = native.unavailable_because() or f"`{native.DISABLE_VARIABLE}` and the CPU decide"
        raise ConfigError(
            f"cannot load the kernels `{name}`: expected `auto` or one of "
            f"{', '.join(f'`{n}`' for n in names)} ({reason}); choose one of these"
        )
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"kernels `{name}`: expected `num_threads` from 1, found {num_threads}")
    if chosen == "torch":
        if name == "auto":
            _warn_once(native.unavailable_because())
        return TorchKernels()
    return NativeKernels(chosen, num_threads=num_threads or usable_cpus())


def _arrays(o: AdamWOperands, scales: tuple[float, float]) -> native.AdamWArrays:
    master = o.master_low if o.master_low is not None else o.master
    return native.AdamWArrays(
        codec=o.codec,
        gradient_dtype=_dtype_name(o.gradient),
        parameter=o.parameter.data_ptr(),
        master=0 if master is None else master.data_ptr(),
        gradient=o.gradient.data_ptr(),
        exp_avg=o.exp_avg.data_ptr(),
        exp_avg_sq=o.exp_avg_sq.data_ptr(),
        num_elements=o.parameter.numel(),
        scales=scales,
    )


def _two_factors(scales: Sequence[float]) -> tuple[float, float]:
    first, second, *_ = (*gradient_factors(scales), 1.0, 1.0)
    return first, second


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@functools.cache
def _warn_once(reason: str | None) -> None:
    _logger.warning("optimizer kernels run in plain torch, several times slower: %s", reason)
