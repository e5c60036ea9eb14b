"""Names in messages."""

from collections.abc import Sequence

_MOST_NAMES = 8


def listed(names: Sequence[str]) -> str:
    """Returns the first few of `names` in backticks, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
    left = len(names) - _MOST_NAMES
    return f"{shown} and {left} more" if left > 0 else shown
