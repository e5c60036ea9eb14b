"""Whether a run may go on under a configuration."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.config import Config, load_config
from offload.errors import ConfigError

_FIXED = ("model", "data", "optimizer", "train.seed", "train.gradient_dtype")
"""What the committed state depends on."""


def require_compatible(config: Config, *, previous: Path) -> None:
    """Refuses a config that differs from that of the run in what its state depends on.

    Args:
        config: With which the run is to go on.
        previous: The config file in the run directory.

    Raises:
        ConfigError: A key of the model, the data, the optimizer, or the seed has changed.
    """
    before = load_config(previous).to_dict()
    after = config.to_dict()
    for key in _FIXED:
        for changed, old, new in _differences(key, _lookup(before, key), _lookup(after, key)):
            raise ConfigError(
                f"cannot resume the run in `{previous.parent}`: expected `{changed}` to be "
                f"{_shown(old)} as when it was started, found {_shown(new)}; "
                "set it back, or start a new run"
            )


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(f"{key}.{name}", old.get(name), new.get(name))
    elif old != new:
        yield key, old, new


def _lookup(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _shown(value: Any) -> str:
    return "unset" if value is None else f"`{value}`"
