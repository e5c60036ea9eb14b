"""Sizes in bytes (`"4GiB"`, rounding), times (`"10min"`) and counts (`"4e6"`), read and written."""

import math
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1 << 40,
}
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d)\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Returns the bytes that `text` names, such as `"400MiB"`, `"1.5 GB"` or `4096`.

    Raises:
        ValueError: The text is not a non-negative number with a known unit.
    """
    if isinstance(text, bool):
        raise ValueError(f"expected a size such as `400MiB`, found `{text}`")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"expected a size of 0 or more bytes, found `{text}`")
        return text
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"expected a size such as `400MiB`, `1.5GB` or a number of bytes, found `{text}`"
        )
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_duration(text: str) -> float:
    """Returns the seconds that `text` names, such as `"90s"`, `"10min"`, `"2h"` or `"7d"`.

    Raises:
        ValueError: The text is no positive number with a known unit.
    """
    match = _DURATION.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"expected a time such as `90s`, `10min`, `2h` or `7d`, found `{text}`")
    return float(match[1]) * _SECONDS[match[2]]


def parse_count(text: str) -> int:
    """Returns the whole number that `text` names, such as `"4000000"`, `"4_000_000"` or `"4e6"`.

    Raises:
        ValueError: The text is no whole number.
    """
    try:
        return int(text)
    except ValueError:
        pass  # or with an exponent
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer():  # neither are nan and inf
        raise ValueError(f"expected a whole number such as `4e6`, found `{text}`")
    return int(value)


def format_size(num_bytes: int | float) -> str:
    """Returns `num_bytes` in binary units with three significant digits, such as `1.22 GiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
