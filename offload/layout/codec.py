"""How the optimizer state of a subgroup is laid out in sections, by update rule and codec.

Pure data: sizes and names. The arithmetic that fills the sections is in `offload.optim`.
"""

from dataclasses import dataclass
from typing import Protocol

from offload.errors import ConfigError
from offload.layout.dtypes import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionKind:
    """One array of a record's state: `num_elements` of `dtype`, one per parameter element."""

    name: str
    dtype: str

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


RULES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "muon": ("momentum_buffer",),
}
"""The state that each update rule keeps beside the master, fp32, by torch's names."""


WHOLE_RULE = "muon"
"""The rule of parameters that are updated as whole matrices."""


class Codec(Protocol):
    """How master and state are encoded. A lossy codec is one more of these."""

    @property
    def name(self) -> str:
        """What `optimizer.codec` calls it."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether what was written is read again, bit for bit."""
        ...

    def sections(
        self, parameter_dtype: str, state: tuple[str, ...]
    ) -> tuple[SectionKind, ...] | None:
        """Returns the sections of a record; None if the codec cannot encode that dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The master's low half beside the bf16 parameter."""

    name: str = "split"
    is_exact: bool = True

    def sections(
        self, parameter_dtype: str, state: tuple[str, ...]
    ) -> tuple[SectionKind, ...] | None:
        if parameter_dtype == "float32":
            return _fp32(state)
        if parameter_dtype != "bfloat16":
            return None
        return (SectionKind(name="master_low", dtype="int16"), *_fp32(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fp32:
    """The whole master."""

    name: str = "fp32"
    is_exact: bool = True

    def sections(
        self, parameter_dtype: str, state: tuple[str, ...]
    ) -> tuple[SectionKind, ...] | None:
        if parameter_dtype == "float32":
            return _fp32(state)
        if parameter_dtype not in ("bfloat16", "float16"):
            return None
        return (SectionKind(name="master", dtype="float32"), *_fp32(state))


CODECS: dict[str, Codec] = {codec.name: codec for codec in (_Split(), _Fp32())}


def section_kinds(codec: str, parameter_dtype: str, rule: str = "adamw") -> tuple[SectionKind, ...]:
    """Returns the sections of `rule`'s state under `codec` for parameters of `parameter_dtype`.

    An fp32 parameter is its own master under either codec.

    Raises:
        ConfigError: The codec or the rule is unknown, or the codec cannot encode that dtype.
    """
    if codec not in CODECS:
        raise ConfigError(f"unknown codec `{codec}`: expected one of {', '.join(CODECS)}")
    if rule not in RULES:
        raise ConfigError(f"unknown update rule `{rule}`: expected one of {', '.join(RULES)}")
    kinds = CODECS[codec].sections(parameter_dtype, RULES[rule])
    if kinds is None:
        raise ConfigError(
            f"codec `{codec}` cannot encode parameters of dtype `{parameter_dtype}`: "
            "`split` takes bfloat16 or float32, `fp32` also float16; set `optimizer.codec`"
        )
    return kinds


def state_bytes_per_element(codec: str, parameter_dtype: str, rule: str = "adamw") -> int:
    """Returns s of the traffic formula: the state bytes of one parameter element."""
    return sum(kind.itemsize for kind in section_kinds(codec, parameter_dtype, rule))


def _fp32(state: tuple[str, ...]) -> tuple[SectionKind, ...]:
    return tuple(SectionKind(name=name, dtype="float32") for name in state)
