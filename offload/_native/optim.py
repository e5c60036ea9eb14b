"""The C library `csrc/optim` seen from Python: kernels over addresses, nothing decided here.

Addresses are plain integers: the caller keeps the memory alive until the call returns. The GIL
is released in every call. Threads belong to the library: one pool per number of threads, started
at first use, asleep between calls, alive until the process ends.
"""

import contextlib
import functools
import importlib
import mmap
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
DTYPES = ("bfloat16", "float32")
"""Dtypes of gradients, in the C library's numbering."""


class Scalars(Protocol):
    """The scalars of one parameter's step; each is an fp32 value."""

    @property
    def c1(self) -> float: ...
    @property
    def c2(self) -> float: ...
    @property
    def b2(self) -> float: ...
    @property
    def q(self) -> float: ...
    @property
    def u(self) -> float: ...
    @property
    def r(self) -> float: ...
    @property
    def e(self) -> float: ...


class Range(Protocol):
    """Elements `start` to `stop - 1` and their scalars."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def scalars(self) -> Scalars: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWArrays:
    """Addresses of one pass's operands, as `struct ofl_optim_adamw` describes them."""

    codec: str
    gradient_dtype: str
    parameter: int
    master: int
    """`master_low`, the fp32 master, or 0, by codec."""
    gradient: int
    exp_avg: int
    exp_avg_sq: int
    num_elements: int
    scales: tuple[float, float]


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


def adamw(variant: str, arrays: AdamWArrays, ranges: Sequence[Range], *, num_threads: int) -> None:
    """Runs one fused AdamW pass; see `ofl_optim_adamw` in `optim.h`.

    Raises:
        OSError: An argument is out of range (EINVAL) or the variant does not run here (ENOTSUP).
    """
    ffi, lib = _extension().ffi, _extension().lib
    operands = ffi.new("struct ofl_optim_adamw *")
    operands.codec = CODECS.index(arrays.codec)
    operands.gradient_dtype = DTYPES.index(arrays.gradient_dtype)
    operands.parameter = ffi.cast("void *", arrays.parameter)
    operands.master = ffi.cast("void *", arrays.master)
    operands.gradient = ffi.cast("void *", arrays.gradient)
    operands.exp_avg = ffi.cast("float *", arrays.exp_avg)
    operands.exp_avg_sq = ffi.cast("float *", arrays.exp_avg_sq)
    operands.num_elements = arrays.num_elements
    operands.scales = arrays.scales
    rows = [(r.start, r.stop, _scalars(r.scalars)) for r in ranges]
    table = ffi.new("struct ofl_optim_adamw_range[]", rows)
    pool = _pool(num_threads, os.getpid())
    result = lib.ofl_optim_adamw(pool, _number(variant), operands, table, len(rows))
    _raise_if(result, f"AdamW over {arrays.num_elements} elements, variant `{variant}`")


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
    rows = [
        (ffi.cast("void *", g.address), g.num_elements, DTYPES.index(g.dtype)) for g in gradients
    ]
    table = ffi.new("struct ofl_optim_gradient[]", rows)
    sums = ffi.new("double[]", len(rows))
    pool = _pool(num_threads, os.getpid())
    result = lib.ofl_optim_sums_of_squares(
        pool, _number(variant), table, len(rows), ffi.new("float[2]", scales), sums
    )
    _raise_if(result, f"sums of squares of {len(rows)} gradients, variant `{variant}`")
    return list(sums)


def copy_rate_bytes_per_s(
    *, num_bytes: int = 64 * MIB, num_threads: int | None = None, rounds: int = 3
) -> float:
    """Returns the bytes read plus written per second of the fastest copy of `num_bytes`.

    The better of `memcpy` and, with the extension, a copy by non-temporal stores, on the threads
    that kernels use; without it one thread copies.
    """
    with mmap.mmap(-1, num_bytes) as target, mmap.mmap(-1, num_bytes) as source:
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
    ffi, lib = _extension().ffi, _extension().lib
    pool = _pool(num_threads, os.getpid())
    with ffi.from_buffer(target) as into, ffi.from_buffer(source) as data:
        start_ns = time.perf_counter_ns()
        result = lib.ofl_optim_copy(pool, into, data, len(source), is_nontemporal)
        elapsed_ns = time.perf_counter_ns() - start_ns
    _raise_if(result, f"copying {len(source)} bytes")
    return elapsed_ns / 1e9


def _copy_pure(target: mmap.mmap, source: mmap.mmap, _threads: int, _nontemporal: bool) -> float:
    with memoryview(target) as into, memoryview(source) as data:
        start_ns = time.perf_counter_ns()
        into[:] = data
        return (time.perf_counter_ns() - start_ns) / 1e9


def _disabled_features() -> int:
    names = os.environ.get(DISABLE_VARIABLE, "")
    mask = int(_extension().lib.ofl_optim_parse_features(names.encode()))
    if mask < 0:
        raise ConfigError(
            f"cannot disable the CPU features `{names}`: expected names out of `avx2`, `avx512`, "
            f"separated by commas; correct or unset `{DISABLE_VARIABLE}`"
        )
    return mask


def _scalars(scalars: Scalars) -> tuple[float, ...]:
    return (
        scalars.c1,
        scalars.c2,
        scalars.b2,
        scalars.q,
        scalars.u,
        scalars.r,
        scalars.e,
    )


def _name(number: int) -> str:
    extension = _extension()
    return str(extension.ffi.string(extension.lib.ofl_optim_variant_name(number)).decode())


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
