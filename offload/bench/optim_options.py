"""What `offload bench optim` measures, from its options."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload._native.cpus import usable_cpus
from offload.errors import ConfigError
from offload.layout import CODECS, RULES, WHOLE_RULE, section_kinds
from offload.optim.kernels import kernel_names
from offload.sizes import parse_count

OPTIMIZERS = tuple(rule for rule in RULES if rule != WHOLE_RULE)
"""The update rules that have kernels; `momentum` is SGD with it."""
DTYPES = ("bfloat16", "float16", "float32")
_MOST_THREADS = 1024
"""More than machines have cores; far more than these the kernel refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimCase:
    """One pass that is measured."""

    optimizer: str
    codec: str
    parameter_dtype: str
    gradient_dtype: str
    isa: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimBenchOptions:
    """Checked options; each combination is one case."""

    num_parameters: int
    threads: tuple[int, ...]
    optimizers: tuple[str, ...]
    codecs: tuple[str, ...]
    parameter_dtype: str
    gradient_dtypes: tuple[str, ...]
    isas: tuple[str, ...]
    num_rounds: int

    def cases(self) -> Iterator[OptimCase]:
        """Yields every combination."""
        combinations = itertools.product(
            self.optimizers, self.codecs, self.gradient_dtypes, self.isas, self.threads
        )
        for optimizer, codec, gradient_dtype, isa, threads in combinations:
            yield OptimCase(
                optimizer=optimizer,
                codec=codec,
                parameter_dtype=self.parameter_dtype,
                gradient_dtype=gradient_dtype,
                isa=isa,
                threads=threads,
            )


def parse_options(
    *,
    parameters: str = "50e6",
    threads: Sequence[int] = (),
    optimizer: Sequence[str] = (),
    codec: Sequence[str] = (),
    parameter_dtype: str = "bfloat16",
    gradient_dtype: Sequence[str] = (),
    isa: Sequence[str] = (),
    rounds: int = 7,
) -> OptimBenchOptions:
    """Returns the options; what is left out is AdamW, both codecs, the best kernels, all CPUs.

    Raises:
        ConfigError: A value is unknown, too small, or cannot be combined.
    """
    available = kernel_names()
    codecs = tuple(codec) or (("fp32",) if parameter_dtype == "float16" else ("split", "fp32"))
    options = OptimBenchOptions(
        num_parameters=_parse_count(parameters),
        threads=tuple(threads) or (usable_cpus(),),
        optimizers=_known("--optimizer", tuple(optimizer) or ("adamw",), OPTIMIZERS),
        codecs=_known("--codec", codecs, tuple(CODECS)),
        parameter_dtype=_known("--parameter-dtype", (parameter_dtype,), DTYPES)[0],
        gradient_dtypes=_known("--gradient-dtype", tuple(gradient_dtype) or ("bfloat16",), DTYPES),
        isas=available if "all" in isa else _known("--isa", tuple(isa) or available[:1], available),
        num_rounds=rounds,
    )
    for count in options.threads:
        if not 1 <= count <= _MOST_THREADS:
            raise _wrong("--threads", f"1 to {_MOST_THREADS}", count)
    if rounds < 1:
        raise _wrong("--rounds", "1 or more", rounds)
    for name in options.codecs:  # refuses what cannot be encoded
        section_kinds(name, parameter_dtype)
    return options


def _parse_count(text: str) -> int:
    try:
        count = parse_count(text)
    except ValueError:
        raise _wrong("--parameters", "a whole number such as 50e6", text) from None
    if count < 1:
        raise _wrong("--parameters", "1 or more", text)
    return count


def _known(option: str, found: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    for name in found:
        if name not in names:
            raise _wrong(option, f"one of {', '.join(names)}", name)
    return found


def _wrong(option: str, expected: str, found: object) -> ConfigError:
    return ConfigError(
        f"cannot measure with `{option} {found}`: expected {expected}, found {found}; "
        f"change `{option}`"
    )
