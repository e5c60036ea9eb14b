"""The field types that the config's models share."""

import os
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from offload.sizes import parse_size


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no conversion between types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


def _as_bytes(value: object) -> int:
    if not isinstance(value, str | int):
        raise ValueError(f"expected a size such as `400MiB`, found `{value}`")
    return parse_size(value)


def _as_absolute(value: object) -> object:
    return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else _as_tuple(value)


Size = Annotated[
    int,
    BeforeValidator(_as_bytes),
    Field(gt=0),
    WithJsonSchema({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string"}]}),
]
"""Bytes; written as `"400MiB"`, `"1.5GB"` or a number of bytes."""
AbsolutePath = Annotated[str, Field(min_length=1), BeforeValidator(_as_absolute)]
"""A path or glob; a relative one starts at the current directory."""
Paths = Annotated[
    tuple[AbsolutePath, ...],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}),
]
"""A list of paths, or a single one."""
Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}),
]
"""A list of glob patterns, or a single one."""
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    BeforeValidator(_as_tuple),
]
Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]

DeviceKind = Literal["cpu", "cuda", "emulated"]
Overlap = Literal["none", "forward", "backward", "both"]
OrderName = Literal["sequential", "alternating", "resident"]
OptimizerName = Literal["adamw", "adam", "adagrad", "lion", "sgd", "muon"]
