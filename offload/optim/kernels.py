"""The optimizer kernels by name, and which of them is best here."""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from offload._native import optim as native
from offload._native.cpus import usable_cpus
from offload.errors import ConfigError
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
from offload.optim.reference import TorchKernels
from offload.optim.scalars import (
    Scalars,
    adagrad_scalars,
    adam_scalars,
    adamw_scalars,
    lion_scalars,
    sgd_scalars,
)

__all__ = [
    "Kernels",
    "NativeKernels",
    "NativeUpdate",
    "Operands",
    "PreparedUpdate",
    "Range",
    "Scalars",
    "Statistics",
    "TorchKernels",
    "adagrad_scalars",
    "adam_scalars",
    "adamw_scalars",
    "kernel_names",
    "lion_scalars",
    "load_kernels",
    "sgd_scalars",
]

_logger = logging.getLogger("offload.optim")


class PreparedUpdate(Protocol):
    """Carries out steps over operands that were checked once.

    Concurrency: One thread at a time.
    """

    def __call__(self, ranges: Sequence[Range], *, gradient_scales: Sequence[float] = ()) -> None:
        """Does what `Kernels.update` does."""


class Kernels(Protocol):
    """The arithmetic of docs/numerics.md; every implementation gives the same bits.

    Concurrency: Any thread; calls of several threads take turns. The GIL is released.
    """

    @property
    def name(self) -> str:
        """`avx512`, `avx2`, `neon`, `scalar` or `torch`."""

    def update(
        self,
        operands: Operands,
        ranges: Sequence[Range],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> None:
        """Carries out one step of `operands.rule` over `ranges`, in place.

        Args:
            operands: One subgroup's tensors. Autograd's version counters are left alone.
            ranges: Ascending, without overlap; elements in none are not touched.
            gradient_scales: At most two factors, multiplied one after the other in fp32 onto the
                unrounded gradient; one of exactly 1 is left out.

        Raises:
            ConfigError: An operand or a range is wrong; nothing was written.
        """

    def prepare(self, operands: Operands) -> PreparedUpdate:
        """Returns `update` of these operands, whose tensors stay where they are.

        Raises:
            ConfigError: An operand is wrong.
        """

    def measured_update(
        self,
        operands: Operands,
        ranges: Sequence[Range],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> list[Statistics]:
        """Does what `update` does and returns what it found in each range, in the same pass."""

    def sums_of_squares(
        self, gradients: Sequence[Tensor], *, scales: Sequence[float] = ()
    ) -> list[float]:
        """Returns the float64 sum of squares of each parameter's gradient, in blocks.

        Args:
            gradients: Each one parameter's, contiguous, on the CPU, of any shape.
            scales: As `gradient_scales` of `update`.

        Raises:
            ConfigError: A gradient is not a plain array on the CPU.
        """

    def count_nonfinite(self, gradients: Sequence[Tensor]) -> list[int]:
        """Returns how many elements of each gradient are infinite or NaN.

        Raises:
            ConfigError: A gradient is not a plain array on the CPU.
        """

    def accumulate(self, accumulator: Tensor, gradient: Tensor) -> None:
        """Adds `gradient` to `accumulator`: in fp32, rounded once to nearest even.

        Shapes: As many elements, each contiguous, bf16, fp16 or fp32.

        Raises:
            ConfigError: One is not a plain array on the CPU, or their sizes differ.
        """


class NativeKernels:
    """The compiled kernels of one variant, on `num_threads` threads of the library's own."""

    def __init__(self, variant: str, *, num_threads: int) -> None:
        self.name = variant
        self.num_threads = num_threads

    def update(
        self,
        operands: Operands,
        ranges: Sequence[Range],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> None:
        """Carries out one step; see `Kernels.update`."""
        self.prepare(operands)(ranges, gradient_scales=gradient_scales)

    def prepare(self, operands: Operands) -> "NativeUpdate":
        """Checks the operands once; see `Kernels.prepare`."""
        return NativeUpdate(operands, self._pass_over(operands))

    def measured_update(
        self,
        operands: Operands,
        ranges: Sequence[Range],
        *,
        gradient_scales: Sequence[float] = (),
    ) -> list[Statistics]:
        """Carries out one step and says what it found; see `Kernels.measured_update`."""
        check_ranges(ranges, operands.parameter.numel())
        scales = _two_factors(gradient_scales)
        rows = self._pass_over(operands).measured_update(ranges, scales=scales)
        return [
            Statistics(
                gradient=row.gradient,
                update=row.update,
                parameter=row.parameter,
                num_nonfinite=row.num_nonfinite,
            )
            for row in rows
        ]

    def sums_of_squares(
        self, gradients: Sequence[Tensor], *, scales: Sequence[float] = ()
    ) -> list[float]:
        """Returns the float64 sum of squares of each gradient; see `Kernels.sums_of_squares`."""
        arrays = _gradient_arrays(gradients)
        return native.sums_of_squares(
            self.name, arrays, scales=_two_factors(scales), num_threads=self.num_threads
        )

    def count_nonfinite(self, gradients: Sequence[Tensor]) -> list[int]:
        """Returns how many elements are infinite or NaN; see `Kernels.count_nonfinite`."""
        return native.count_nonfinite(
            self.name, _gradient_arrays(gradients), num_threads=self.num_threads
        )

    def bare_pass(self, operands: Operands) -> None:
        """Reads and writes what `update` would, and computes nothing: what the memory can do.

        Under codec `fp32` a bf16 parameter becomes 1; all else stays as it is. The last elements
        that fill no vector are left out.
        """
        native.bare_pass(self.name, _checked_arrays(operands), num_threads=self.num_threads)

    def accumulate(self, accumulator: Tensor, gradient: Tensor) -> None:
        """Adds a gradient; see `Kernels.accumulate`."""
        check_accumulation(accumulator, gradient)
        into, added = _gradient_arrays([accumulator, gradient])
        native.accumulate(self.name, into, added, num_threads=self.num_threads)

    def _pass_over(self, operands: Operands) -> native.Pass:
        return native.Pass(self.name, _checked_arrays(operands), num_threads=self.num_threads)


class NativeUpdate:
    """The compiled update of some operands; see `PreparedUpdate`."""

    def __init__(self, operands: Operands, over: native.Pass) -> None:
        self._operands = operands  # whose memory the pass knows by address
        self._num_elements = operands.parameter.numel()
        self._pass = over

    def __call__(self, ranges: Sequence[Range], *, gradient_scales: Sequence[float] = ()) -> None:
        """Carries out one step."""
        check_ranges(ranges, self._num_elements)
        self._pass.update(ranges, scales=_two_factors(gradient_scales))


def kernel_names() -> tuple[str, ...]:
    """Returns the names that `load_kernels` takes here, the best first."""
    return (*native.variants(), "torch") if native.available() else ("torch",)


def load_kernels(name: str = "auto", *, num_threads: int | None = None) -> Kernels:
    """Returns the kernels called `name`; `auto` is the best that run here.

    Args:
        name: `auto`, `avx512`, `avx2`, `neon`, `scalar` or `torch`.
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


def _checked_arrays(o: Operands) -> native.UpdateArrays:
    check_operands(o)
    master = o.master_low if o.master_low is not None else o.master
    return native.UpdateArrays(
        rule=o.rule,
        codec=o.codec,
        parameter_dtype=_dtype_name(o.parameter),
        gradient_dtype=_dtype_name(o.gradient),
        parameter=o.parameter.data_ptr(),
        master=0 if master is None else master.data_ptr(),
        gradient=o.gradient.data_ptr(),
        first=_address(o.state, "exp_avg", "momentum_buffer"),
        second=_address(o.state, "exp_avg_sq", "sum"),
        num_elements=o.parameter.numel(),
    )


def _address(state: Mapping[str, Tensor], *names: str) -> int:
    """The address of the one of `names` that the state has, or 0."""
    return next((state[name].data_ptr() for name in names if name in state), 0)


def _gradient_arrays(gradients: Sequence[Tensor]) -> list[native.GradientArray]:
    for gradient in gradients:
        check_array("gradient", gradient, GRADIENT_DTYPES)
    return [
        native.GradientArray(address=g.data_ptr(), num_elements=g.numel(), dtype=_dtype_name(g))
        for g in gradients
    ]


def _two_factors(scales: Sequence[float]) -> tuple[float, float]:
    if not scales:
        return 1.0, 1.0
    first, second, *_ = (*gradient_factors(scales), 1.0, 1.0)
    return first, second


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@functools.cache
def _warn_once(reason: str | None) -> None:
    _logger.warning("optimizer kernels run in plain torch, several times slower: %s", reason)
