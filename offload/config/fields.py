"""The field types that the config's models share."""

import os
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from offload.sizes import parse_duration, parse_size


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
    if not isinstance(value, str) or not value:  # an empty one is no path, not the current one
        return value
    return os.path.abspath(os.path.expanduser(value))


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else _as_tuple(value)


_MOST = (1 << 63) - 1
"""A TOML file has no larger whole number, nor has torch."""
Size = Annotated[
    int,
    BeforeValidator(_as_bytes),
    Field(gt=0, le=_MOST),
    WithJsonSchema({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string"}]}),
]
"""Bytes; written as `"400MiB"`, `"1.5GB"` or a number of bytes."""
FREE = "free"
"""Instead of a capacity: all free space of the path but a margin."""
UNLIMITED = "none"
"""Instead of a rate limit."""


def _as_sizes(value: object) -> object:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return (_as_path_size(value),)
    if isinstance(value, list | tuple):
        return tuple(map(_as_path_size, value))
    return value


def _as_path_size(value: object) -> object:
    return value if value in (FREE, UNLIMITED) else _as_bytes(value)


_SIZES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string"},
        {"type": "array", "items": {"type": ["integer", "string"]}},
    ]
}
Capacities = Annotated[
    tuple[Annotated[int, Field(gt=0, le=_MOST)] | Literal["free"], ...],
    BeforeValidator(_as_sizes),
    WithJsonSchema(_SIZES_SCHEMA),
]
"""A size or `"free"` for each path, or one for all."""
RateLimits = Annotated[
    tuple[Annotated[int, Field(gt=0, le=_MOST)] | Literal["none"], ...],
    BeforeValidator(_as_sizes),
    WithJsonSchema(_SIZES_SCHEMA),
]
"""Bytes/s or `"none"` for each path, or one for all."""


def _as_interval(value: object) -> object:
    if isinstance(value, str):
        parse_duration(value)
    return value


Duration = Annotated[str, BeforeValidator(_as_interval)]
"""A time such as `"90s"`, `"10min"`, `"2h"` or `"7d"`."""
StepsOrDuration = Annotated[int, Field(ge=0, le=_MOST)] | Duration
"""A number of steps, or a time."""
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
Count = Annotated[int, Field(gt=0, le=_MOST)]
Dimension = Annotated[int, Field(gt=0, le=1 << 24)]
"""Of a tensor: the product of two of them, and of their bytes, is still a number of torch's."""
Repetitions = Annotated[int, Field(gt=0, le=100_000)]
"""Of what is gone through one by one when a run is planned."""
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
NotNegative = Annotated[float, Field(ge=0)]

DeviceKind = Literal["cpu", "cuda", "emulated"]
Overlap = Literal["none", "forward", "backward", "both"]
OrderName = Literal["sequential", "alternating", "resident"]
OptimizerName = Literal["adamw", "adam", "adagrad", "lion", "sgd", "muon"]
STRIPING_PATTERN = r"^(adaptive|proportional|single|modulo(:[1-9]\d{0,5})*)$"
StripingName = Annotated[str, Field(pattern=STRIPING_PATTERN)]
