"""How the optimizer state of a subgroup is laid out in sections, by codec.

Pure data: sizes and names. The arithmetic that fills the sections is in `offload.optim`.
"""

from dataclasses import dataclass

from offload.errors import ConfigError
from offload.layout.dtypes import DTYPES

CODECS = ("split", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionKind:
    """One array of a record's state: `num_elements` of `dtype`, one per parameter element."""

    name: str
    dtype: str

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


_MASTER_LOW = SectionKind(name="master_low", dtype="int16")
_MASTER = SectionKind(name="master", dtype="float32")
_MOMENTS = (
    SectionKind(name="exp_avg", dtype="float32"),
    SectionKind(name="exp_avg_sq", dtype="float32"),
)


def section_kinds(codec: str, parameter_dtype: str) -> tuple[SectionKind, ...]:
    """Returns the sections of AdamW's state under `codec` for parameters of `parameter_dtype`.

    An fp32 parameter is its own master under either codec.

    Raises:
        ConfigError: The codec is unknown or cannot encode that dtype.
    """
    if codec not in CODECS:
        raise ConfigError(f"unknown codec `{codec}`: expected one of {', '.join(CODECS)}")
    if parameter_dtype == "float32":
        return _MOMENTS
    if codec == "split" and parameter_dtype == "bfloat16":
        return (_MASTER_LOW, *_MOMENTS)
    if codec == "fp32" and parameter_dtype in ("bfloat16", "float16"):
        return (_MASTER, *_MOMENTS)
    raise ConfigError(
        f"codec `{codec}` cannot encode parameters of dtype `{parameter_dtype}`: "
        "`split` takes bfloat16 or float32, `fp32` also float16; set `optimizer.codec`"
    )


def state_bytes_per_element(codec: str, parameter_dtype: str) -> int:
    """Returns s of the traffic formula: the state bytes of one parameter element."""
    return sum(kind.itemsize for kind in section_kinds(codec, parameter_dtype))
