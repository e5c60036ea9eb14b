"""Writes plain values as TOML, which the standard library only reads."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_toml(values: Mapping[str, Any]) -> str:
    """Returns a TOML document with `values`; nested mappings become tables.

    Raises:
        TypeError: A value is not a string, bool, number, list or mapping.
    """
    lines: list[str] = []
    _add_table(lines, values, ())
    return "\n".join(lines).strip() + "\n"


def _add_table(lines: list[str], values: Mapping[str, Any], path: tuple[str, ...]) -> None:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if path and (plain or not values):
        lines += ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, Mapping):
            _add_table(lines, value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return _string(value)
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case Mapping():
            return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())} }}"
    raise TypeError(f"cannot write a {type(value).__name__} as TOML: found `{value!r}`")


def _string(text: str) -> str:
    # JSON's escapes are TOML's too, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
