"""Figures as text, with the unit that their names carry."""

from offload.sizes import format_size

NONE = "-"


def format_figure(key: str, value: object) -> str:
    """Returns `value` with the unit that its name `key` has; None is `-`."""
    match value:
        case None:
            return NONE
        case bool():
            return "yes" if value else "no"
        case dict():
            return "\n".join(f"{name}: {format_figure(key, item)}" for name, item in value.items())
        case list():
            return "\n".join(format_figure(key, item) for item in value) or NONE
        case int() | float():
            return _number(key, value)
    return str(value)


def _number(key: str, value: float) -> str:
    if "bytes" in key.split("_"):
        return f"{format_size(value)}{'/s' if key.endswith('_per_s') else ''}"
    if key.endswith("_s") and not key.endswith("_per_s"):
        return f"{value:.3f} s"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if "loss" in key.split("_") else f"{value:.4g}"
