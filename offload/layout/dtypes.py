"""The element types that layouts and stores know, by torch's names; no torch here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type."""

    name: str
    """torch's name without `torch.`, such as `bfloat16`."""
    itemsize: int
    safetensors: str
    """The code of the safetensors format, such as `BF16`."""


_TABLE = (
    ("float64", 8, "F64"),
    ("float32", 4, "F32"),
    ("float16", 2, "F16"),
    ("bfloat16", 2, "BF16"),
    ("int64", 8, "I64"),
    ("int32", 4, "I32"),
    ("int16", 2, "I16"),
    ("int8", 1, "I8"),
    ("uint8", 1, "U8"),
    ("bool", 1, "BOOL"),
)
DTYPES = {name: DType(name=name, itemsize=size, safetensors=code) for name, size, code in _TABLE}
