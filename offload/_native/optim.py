"""The C library `csrc/optim` seen from Python: kernels over addresses, nothing decided here.

Addresses are plain integers: the caller keeps the memory alive until the call returns. The GIL
is released in every call. Threads belong to the library: one pool per number of threads, started
at first use, asleep between calls, alive until the process ends.
"""

import contextlib
import functools
import importlib
import mmap
import operator
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offload._native.cpus import usable_cpus
from offload.errors import ConfigError
from offload.sizes import MIB

DISABLE_VARIABLE = "OFFLOAD_DISABLE_CPU_FEATURES"
CODECS = ("split", "fp32", "parameter")
"""How the master is encoded, in the C library's numbering."""
DTYPES = ("bfloat16", "float32", "float16")
"""Dtypes of parameters and gradients, in the C library's numbering."""
RULES = ("adamw", "adam", "lion", "sgd", "momentum", "adagrad")
"""Update rules, in the C library's numbering."""
SCALARS = ("b1", "c1", "b2", "c2", "q", "w", "u", "r", "e", "a", "is_nesterov")
"""The fields of `struct ofl_optim_scalars`, in order."""


_scalars_of = operator.attrgetter(*SCALARS)


class Range(Protocol):
    """Elements `start` to `stop - 1`, and `scalars` that has the fields `SCALARS`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def scalars(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateArrays:
    """Addresses of one pass's operands, as `struct ofl_optim_operands` describes them."""

    rule: str
    codec: str
    parameter_dtype: str
    gradient_dtype: str
    parameter: int
    master: int
    """`master_low`, the fp32 master, or 0, by codec."""
    gradient: int
    first: int
    second: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRow:
    """What `struct ofl_optim_statistics` says of one range."""

    gradient: float
    update: float
    parameter: float
    num_nonfinite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientArray:
    """Address of one parameter's gradient."""

    address: int
    num_elements: int
    dtype: str


def unavailable_because() -> str | None:
    """Returns why the extension cannot be used, or None if it can."""
    if os.environ.get("OFFLOAD_PURE") == "1":
        return "OFFLOAD_PURE=1 is set"
    try:
        _extension()
    except ImportError as error:
        return f"the extension `offload._native._optim` is missing ({error})"
    return None


def available() -> bool:
    """Tells whether the extension can be used."""
    return unavailable_because() is None


def variants() -> tuple[str, ...]:
    """Returns the variants that run here, the best first; always with `scalar`.

    Raises:
        ConfigError: `OFFLOAD_DISABLE_CPU_FEATURES` names an unknown feature.
    """
    lib = _extension().lib
    features = lib.ofl_optim_cpu_features() & ~_disabled_features()
    numbers = range(lib.OFL_OPTIM_NUM_VARIANTS - 1, -1, -1)
    return tuple(_name(n) for n in numbers if lib.ofl_optim_variant_runs(n, features))


class Pass:
    """The fused pass over operands that stay where they are; see `ofl_optim_update` in `optim.h`.

    Concurrency: One thread at a time.
    """

    def __init__(self, variant: str, arrays: UpdateArrays, *, num_threads: int) -> None:
        self._variant = variant
        self._arrays = arrays
        self._num_threads = num_threads
        self._operands = _operands(arrays)

    def update(self, ranges: Sequence[Range], *, scales: tuple[float, float]) -> None:
        """Runs it once over `ranges`.

        Raises:
            OSError: An argument is out of range (EINVAL) or the variant does not run here
                (ENOTSUP).
        """
        self._run(ranges, scales, _extension().ffi.NULL)

    def measured_update(
        self, ranges: Sequence[Range], *, scales: tuple[float, float]
    ) -> list[StatisticsRow]:
        """Runs it once and returns the statistics of each range; see `update`."""
        found = _extension().ffi.new("struct ofl_optim_statistics[]", len(ranges))
        self._run(ranges, scales, found)
        return [
            StatisticsRow(
                gradient=row.gradient,
                update=row.update,
                parameter=row.parameter,
                num_nonfinite=row.num_nonfinite,
            )
            for row in found
        ]

    def _run(self, ranges: Sequence[Range], scales: tuple[float, float], statistics: Any) -> None:
        ffi, lib = _extension().ffi, _extension().lib
        rows = [(r.start, r.stop, _scalars_of(r.scalars)) for r in ranges]
        table = ffi.new("struct ofl_optim_range[]", rows)
        pool = _pool(self._num_threads, os.getpid())
        self._operands.scales = scales
        variant, num_ranges = _number(self._variant), len(rows)
        result = lib.ofl_optim_update(pool, variant, self._operands, table, num_ranges, statistics)
        if result < 0:
            arrays = self._arrays
            what = f"{arrays.rule} over {arrays.num_elements} elements, variant `{self._variant}`"
            _raise_if(result, what)


def sums_of_squares(
    variant: str,
    gradients: Sequence[GradientArray],
    *,
    scales: tuple[float, float],
    num_threads: int,
) -> list[float]:
    """Returns the sum of squares of each gradient; see `ofl_optim_sums_of_squares`.

    Raises:
        OSError: An argument is out of range (EINVAL) or the variant does not run here (ENOTSUP).
    """
    ffi, lib = _extension().ffi, _extension().lib
    table = _gradient_table(gradients)
    sums = ffi.new("double[]", len(gradients))
    pool = _pool(num_threads, os.getpid())
    result = lib.ofl_optim_sums_of_squares(
        pool, _number(variant), table, len(gradients), ffi.new("float[2]", scales), sums
    )
    _raise_if(result, f"sums of squares of {len(gradients)} gradients, variant `{variant}`")
    return list(sums)


def count_nonfinite(
    variant: str, gradients: Sequence[GradientArray], *, num_threads: int
) -> list[int]:
    """Returns how many elements of each are not finite; see `ofl_optim_count_nonfinite`.

    Raises:
        OSError: An argument is out of range (EINVAL) or the variant does not run here (ENOTSUP).
    """
    ffi, lib = _extension().ffi, _extension().lib
    table = _gradient_table(gradients)
    counts = ffi.new("uint64_t[]", len(gradients))
    pool = _pool(num_threads, os.getpid())
    for i in range(len(gradients)):
        result = lib.ofl_optim_count_nonfinite(pool, _number(variant), table + i, counts + i)
        _raise_if(result, f"counting values that are not finite, variant `{variant}`")
    return list(counts)


def accumulate(
    variant: str, accumulator: GradientArray, gradient: GradientArray, *, num_threads: int
) -> None:
    """Adds `gradient` to `accumulator`; see `ofl_optim_accumulate`.

    Raises:
        OSError: An argument is out of range (EINVAL) or the variant does not run here (ENOTSUP).
    """
    ffi, lib = _extension().ffi, _extension().lib
    result = lib.ofl_optim_accumulate(
        _pool(num_threads, os.getpid()),
        _number(variant),
        ffi.cast("void *", accumulator.address),
        DTYPES.index(accumulator.dtype),
        _gradient_table([gradient]),
    )
    _raise_if(result, f"accumulating {gradient.num_elements} elements, variant `{variant}`")


def copy(
    *, target: int, source: int, num_bytes: int, is_nontemporal: bool, num_threads: int
) -> None:
    """Copies between two addresses; see `ofl_optim_copy`."""
    ffi, lib = _extension().ffi, _extension().lib
    result = lib.ofl_optim_copy(
        _pool(num_threads, os.getpid()),
        ffi.cast("void *", target),
        ffi.cast("void *", source),
        num_bytes,
        is_nontemporal,
    )
    _raise_if(result, f"copying {num_bytes} bytes")


def read(variant: str, *, source: int, num_bytes: int, num_threads: int) -> int:
    """Reads memory and returns what it folds to; see `ofl_optim_read`."""
    ffi, lib = _extension().ffi, _extension().lib
    folded = ffi.new("uint64_t *")
    pool = _pool(num_threads, os.getpid())
    address = ffi.cast("void *", source)
    result = lib.ofl_optim_read(pool, _number(variant), address, num_bytes, folded)
    _raise_if(result, f"reading {num_bytes} bytes")
    return int(folded[0])


def bare_pass(variant: str, arrays: UpdateArrays, *, num_threads: int) -> None:
    """Moves what an update would and computes nothing; see `ofl_optim_bare_pass`."""
    pool = _pool(num_threads, os.getpid())
    result = _extension().lib.ofl_optim_bare_pass(pool, _number(variant), _operands(arrays))
    _raise_if(result, f"a bare pass over {arrays.num_elements} elements, variant `{variant}`")


def copy_rate_bytes_per_s(
    *, num_bytes: int = 64 * MIB, num_threads: int | None = None, rounds: int = 3
) -> float:
    """Returns the bytes read plus written per second of the fastest copy of `num_bytes`.

    The better of `memcpy` and, with the extension, a copy by non-temporal stores, on the threads
    that kernels use; without it one thread copies.
    """
    # Private: of shared memory the kernel may give no huge pages, though it is advised to.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with (
        mmap.mmap(-1, num_bytes, flags=flags) as target,
        mmap.mmap(-1, num_bytes, flags=flags) as source,
    ):
        for region in (target, source):
            with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
                region.madvise(mmap.MADV_HUGEPAGE)
            region[::4096] = b"\1" * len(range(0, num_bytes, 4096))
        copy = _copy_native if available() else _copy_pure
        threads = num_threads or usable_cpus()
        seconds = [copy(target, source, threads, i % 2 == 1) for i in range(2 * rounds)]
    return 2 * num_bytes / min(seconds)


def _copy_native(
    target: mmap.mmap, source: mmap.mmap, num_threads: int, is_nontemporal: bool
) -> float:
    ffi = _extension().ffi
    with ffi.from_buffer(target) as into, ffi.from_buffer(source) as data:
        start_ns = time.perf_counter_ns()
        copy(
            target=int(ffi.cast("uintptr_t", into)),
            source=int(ffi.cast("uintptr_t", data)),
            num_bytes=len(source),
            is_nontemporal=is_nontemporal,
            num_threads=num_threads,
        )
        return (time.perf_counter_ns() - start_ns) / 1e9


def _copy_pure(target: mmap.mmap, source: mmap.mmap, _threads: int, _nontemporal: bool) -> float:
    with memoryview(target) as into, memoryview(source) as data:
        start_ns = time.perf_counter_ns()
        into[:] = data
        return (time.perf_counter_ns() - start_ns) / 1e9


def _operands(arrays: UpdateArrays) -> Any:
    ffi = _extension().ffi
    operands = ffi.new("struct ofl_optim_operands *")
    operands.rule = RULES.index(arrays.rule)
    operands.codec = CODECS.index(arrays.codec)
    operands.parameter_dtype = DTYPES.index(arrays.parameter_dtype)
    operands.gradient_dtype = DTYPES.index(arrays.gradient_dtype)
    operands.parameter = ffi.cast("void *", arrays.parameter)
    operands.master = ffi.cast("void *", arrays.master)
    operands.gradient = ffi.cast("void *", arrays.gradient)
    operands.first = ffi.cast("float *", arrays.first)
    operands.second = ffi.cast("float *", arrays.second)
    operands.num_elements = arrays.num_elements
    operands.scales = (1.0, 1.0)
    return operands


def _gradient_table(gradients: Sequence[GradientArray]) -> Any:
    ffi = _extension().ffi
    rows = [
        (ffi.cast("void *", g.address), g.num_elements, DTYPES.index(g.dtype)) for g in gradients
    ]
    return ffi.new("struct ofl_optim_gradient[]", rows)


def _disabled_features() -> int:
    names = os.environ.get(DISABLE_VARIABLE, "")
    mask = int(_extension().lib.ofl_optim_parse_features(names.encode()))
    if mask < 0:
        raise ConfigError(
            f"cannot disable the CPU features `{names}`: expected names out of `avx2`, "
            f"`avx512`, `neon`, separated by commas; correct or unset `{DISABLE_VARIABLE}`"
        )
    return mask


@functools.cache
def _name(number: int) -> str:
    extension = _extension()
    return str(extension.ffi.string(extension.lib.ofl_optim_variant_name(number)).decode())


@functools.cache
def _number(variant: str) -> int:
    for number in range(_extension().lib.OFL_OPTIM_NUM_VARIANTS):
        if _name(number) == variant:
            return number
    raise ConfigError(f"unknown kernel variant `{variant}`: expected one of {variants()}")


@functools.cache
def _pool(num_threads: int, _pid: int) -> Any:
    """Opens a pool of this process; never closed, since a daemon thread may be inside at exit."""
    pool = _extension().ffi.new("struct ofl_optim_pool **")
    result = _extension().lib.ofl_optim_pool_open(pool, num_threads)
    _raise_if(result, f"starting {num_threads} kernel threads")
    return pool[0]


@functools.cache
def _extension() -> Any:
    return importlib.import_module("offload._native._optim")


def _raise_if(result: int, what: str) -> None:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
