"""`key=value` arguments that change single keys of a configuration."""

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from offload.errors import ConfigError


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Returns the value of each dotted key; a value that is not TOML is taken as text.

    Raises:
        ConfigError: An argument has no `=` or no key.
    """
    return dict(_parse_override(argument) for argument in arguments)


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values` with each dotted key of `overrides` set; the arguments stay unchanged.

    Raises:
        ConfigError: A key leads through something that is not a table.
    """
    merged = _copied(values)
    for key, value in overrides.items():
        _set(merged, key, value)
    return merged


def _parse_override(argument: str) -> tuple[str, Any]:
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"cannot read override `{argument}`: expected `key=value` such as `train.steps=4`, "
            f"found no {'key' if equals else '`=`'}; write the dotted key and its value"
        )
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return key, text
    # Text with a line break could smuggle in further keys; then it is text.
    return key, parsed["value"] if len(parsed) == 1 else text


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    table = values
    for depth, part in enumerate(parents, start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"cannot set `{key}`: expected `{'.'.join(parents[:depth])}` to be a table, "
                f"found `{table}`; set that key alone or leave it out"
            )
    table[last] = value
