"""How fast optimizer kernels are beside what the memory can do, and beside torch's own."""

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from offload._native import optim as native
from offload.bench.environment import describe_environment
from offload.bench.optim_memory import OptimMemory, require_room
from offload.bench.optim_options import OptimBenchOptions, OptimCase
from offload.optim.kernels import Kernels, NativeKernels, Range, adamw_scalars, load_kernels

_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """What one case reached; medians of interleaved rounds."""

    optimizer: str
    codec: str
    gradient_dtype: str
    parameter_dtype: str
    isa: str
    threads: int
    parameters: int
    seconds: float
    parameters_per_s: float
    bytes_per_parameter: int
    bytes_per_s: float
    memcpy_bytes_per_s: float
    ratio_to_memcpy: float
    bare_bytes_per_s: float | None
    """Of a pass over the same arrays that computes nothing; None for kernels in torch."""
    ratio_to_bare: float | None
    spread: float
    """The slowest round over the fastest."""
    fastest_ratio_to_memcpy: float
    """Of the fastest rounds of each: what is left of it where other programs take processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperResult:
    """What one gradient helper reached beside a plain read in the same rounds."""

    helper: str
    gradient_dtype: str
    isa: str
    threads: int
    bytes_per_s: float
    reference: str
    """`read`, or for what also writes `copy`."""
    reference_bytes_per_s: float
    ratio_to_reference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchResult:
    """torch's fused AdamW on as many parameters and threads."""

    fused_parameters_per_s: float
    fused_with_casts_parameters_per_s: float
    """With the gradient cast to fp32 before it and the master to bf16 after it, into tensors that
    stay: the least that it can cost."""
    fused_with_new_gradients_parameters_per_s: float
    """The same with `master.grad = gradient.float()`: a new tensor each step."""
    split_parameters_per_s: float
    """Of our AdamW with codec `split`, in the same rounds."""
    split_over_fused_with_casts: float
    fastest_split_over_fused_with_casts: float
    """Of the fastest rounds of each."""
    split_over_fused_with_new_gradients: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimReport:
    """All results of one run."""

    results: list[OptimResult]
    helpers: list[HelperResult]
    torch: TorchResult
    environment: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `--json` prints."""
        return asdict(self)


def run_optim_bench(
    options: OptimBenchOptions, *, on_case: Callable[[OptimCase], None] = lambda _: None
) -> OptimReport:
    """Measures every case, the gradient helpers and torch, one after the other.

    Raises:
        PlanError: This machine has less memory free than one of them takes.
    """
    require_room(
        options.cases(),
        beside_torch=_split_case(options),
        num_parameters=options.num_parameters,
    )
    results: list[OptimResult] = []
    helpers: list[HelperResult] = []
    measured: set[tuple[str, int, str]] = set()
    for case in options.cases():
        on_case(case)
        memory = OptimMemory(case, num_parameters=options.num_parameters)
        memory.open()
        kernels = load_kernels(case.isa, num_threads=case.threads)
        results.append(_measure(case, memory, kernels, options))
        key = (case.isa, case.threads, case.gradient_dtype)
        if key not in measured:
            measured.add(key)
            helpers += _measure_helpers(case, memory, kernels, options)
        # Cycles would keep the arena, of gigabytes, beside that of the next case.
        del memory
        gc.collect()
    return OptimReport(
        results=results,
        helpers=helpers,
        torch=_measure_torch(options),
        environment=describe_environment(),
    )


def interleaved(
    actions: dict[str, Callable[[], object]], *, warm: Callable[[], object], num_rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of each action in each round, after one round that does not count.

    Interleaved, since a machine's memory and clock change from one second to the next. Before each
    is a pause: OpenMP's threads spin for some milliseconds after torch's operations, on processors
    that the next action would use. Processors that have idled then run slowly for some
    milliseconds, which would cost a short action more than a long one: so `warm`, not measured,
    keeps all of them busy just before each.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for index in range(num_rounds + 1):
        for name, action in actions.items():
            time.sleep(_PAUSE_S)
            warm()
            started_s = time.perf_counter()
            action()
            elapsed_s = time.perf_counter() - started_s
            if index:
                seconds[name].append(elapsed_s)
    return seconds


def _measure(
    case: OptimCase, memory: OptimMemory, kernels: Kernels, options: OptimBenchOptions
) -> OptimResult:
    whole = _whole(options)
    actions: dict[str, Callable[[], object]] = {
        "memcpy": _copier(case, memory, is_nontemporal=False),
        "non-temporal": _copier(case, memory, is_nontemporal=True),
        "pass": lambda: kernels.update(memory.operands, [whole]),
    }
    if isinstance(kernels, NativeKernels):
        actions["bare"] = functools.partial(kernels.bare_pass, memory.operands)
    seconds = interleaved(actions, warm=_reader(case, memory.source), num_rounds=options.num_rounds)
    typical_s = {name: statistics.median(each) for name, each in seconds.items()}
    copied_bytes = 2 * memory.source.numel() * memory.source.element_size()
    copy_rate = copied_bytes / min(typical_s["memcpy"], typical_s["non-temporal"])
    pass_bytes = options.num_parameters * memory.bytes_per_parameter
    rate = pass_bytes / typical_s["pass"]
    bare_rate = pass_bytes / typical_s["bare"] if "bare" in typical_s else None
    return OptimResult(
        optimizer=case.optimizer,
        codec=case.codec,
        gradient_dtype=case.gradient_dtype,
        parameter_dtype=case.parameter_dtype,
        isa=case.isa,
        threads=case.threads,
        parameters=options.num_parameters,
        seconds=typical_s["pass"],
        parameters_per_s=options.num_parameters / typical_s["pass"],
        bytes_per_parameter=memory.bytes_per_parameter,
        bytes_per_s=rate,
        memcpy_bytes_per_s=copy_rate,
        ratio_to_memcpy=rate / copy_rate,
        bare_bytes_per_s=bare_rate,
        ratio_to_bare=None if bare_rate is None else rate / bare_rate,
        spread=max(seconds["pass"]) / min(seconds["pass"]),
        fastest_ratio_to_memcpy=pass_bytes
        / copied_bytes
        * min(*seconds["memcpy"], *seconds["non-temporal"])
        / min(seconds["pass"]),
    )


def _measure_helpers(
    case: OptimCase, memory: OptimMemory, kernels: Kernels, options: OptimBenchOptions
) -> list[HelperResult]:
    gradient, other = memory.operands.gradient, memory.target.view(memory.operands.gradient.dtype)
    accumulator = other[: gradient.numel()]
    warm = _reader(case, memory.source)
    # Apart: what a copy or a pass that writes leaves in the caches, the next one has to write back.
    seconds = interleaved(
        {
            "read": _reader(case, gradient),
            "norm": lambda: kernels.sums_of_squares([gradient]),
            "nonfinite": lambda: kernels.count_nonfinite([gradient]),
        },
        warm=warm,
        num_rounds=options.num_rounds,
    ) | interleaved(
        {
            "copy": _copier(case, memory, is_nontemporal=True),
            "accumulate": lambda: kernels.accumulate(accumulator, gradient),
        },
        warm=warm,
        num_rounds=options.num_rounds,
    )
    typical_s = {name: statistics.median(each) for name, each in seconds.items()}
    gradient_bytes = gradient.numel() * gradient.element_size()
    copied_bytes = 2 * memory.source.numel() * memory.source.element_size()
    rates = {
        "read": gradient_bytes / typical_s["read"],
        "copy": copied_bytes / typical_s["copy"],
        "norm": gradient_bytes / typical_s["norm"],
        "nonfinite": gradient_bytes / typical_s["nonfinite"],
        "accumulate": 3 * gradient_bytes / typical_s["accumulate"],
    }
    references = {"norm": "read", "nonfinite": "read", "accumulate": "copy"}
    return [
        HelperResult(
            helper=helper,
            gradient_dtype=case.gradient_dtype,
            isa=case.isa,
            threads=case.threads,
            bytes_per_s=rates[helper],
            reference=reference,
            reference_bytes_per_s=rates[reference],
            ratio_to_reference=rates[helper] / rates[reference],
        )
        for helper, reference in references.items()
    ]


def _copier(case: OptimCase, memory: OptimMemory, *, is_nontemporal: bool) -> Callable[[], object]:
    source, target = memory.source, memory.target
    if not native.available():
        return lambda: target.copy_(source)
    return lambda: native.copy(
        target=target.data_ptr(),
        source=source.data_ptr(),
        num_bytes=source.numel() * source.element_size(),
        is_nontemporal=is_nontemporal,
        num_threads=case.threads,
    )


def _reader(case: OptimCase, values: Tensor) -> Callable[[], object]:
    if not native.available():
        return lambda: values.view(torch.int16).bitwise_or(0)
    variant = case.isa if case.isa != "torch" else native.variants()[0]
    return lambda: native.read(
        variant,
        source=values.data_ptr(),
        num_bytes=values.numel() * values.element_size(),
        num_threads=case.threads,
    )


def _measure_torch(options: OptimBenchOptions) -> TorchResult:
    master = torch.full((options.num_parameters,), 0.01)
    master.grad = torch.full_like(master, 0.5)
    half, half_gradient = master.bfloat16(), master.grad.bfloat16()
    optimizer = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.1, fused=True)
    case = _split_case(options)
    memory = OptimMemory(case, num_parameters=options.num_parameters)
    memory.open()
    kernels = load_kernels(case.isa, num_threads=case.threads)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(options.threads))

    def step_with_casts() -> None:
        assert master.grad is not None
        master.grad.copy_(half_gradient)
        optimizer.step()
        half.copy_(master.detach())

    def step_with_new_gradients() -> None:
        master.grad = half_gradient.float()
        optimizer.step()
        half.copy_(master.detach())

    actions: dict[str, Callable[[], object]] = {
        "fused": optimizer.step,
        "with casts": step_with_casts,
        "new gradients": step_with_new_gradients,
        "split": lambda: kernels.update(memory.operands, [_whole(options)]),
    }
    try:
        seconds = interleaved(
            actions, warm=_reader(case, memory.source), num_rounds=options.num_rounds
        )
    finally:
        torch.set_num_threads(threads)
    rates = {
        name: options.num_parameters / statistics.median(each) for name, each in seconds.items()
    }
    return TorchResult(
        fused_parameters_per_s=rates["fused"],
        fused_with_casts_parameters_per_s=rates["with casts"],
        fused_with_new_gradients_parameters_per_s=rates["new gradients"],
        split_parameters_per_s=rates["split"],
        split_over_fused_with_casts=rates["split"] / rates["with casts"],
        fastest_split_over_fused_with_casts=min(seconds["with casts"]) / min(seconds["split"]),
        split_over_fused_with_new_gradients=rates["split"] / rates["new gradients"],
    )


def _split_case(options: OptimBenchOptions) -> OptimCase:
    """The pass that does what torch does with both casts."""
    return OptimCase(
        optimizer="adamw",
        codec="split",
        parameter_dtype="bfloat16",
        gradient_dtype="bfloat16",
        isa=options.isas[0],
        threads=max(options.threads),
    )


def _whole(options: OptimBenchOptions) -> Range:
    scalars = adamw_scalars(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10)
    return Range(start=0, stop=options.num_parameters, scalars=scalars)
