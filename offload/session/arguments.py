"""The arguments of a session, as values of a configuration."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.config import Config, build_config, load_config
from offload.sizes import parse_size

_log = logging.getLogger("offload.session")


def resolve(config: Config | Mapping[str, Any] | str | Path | None, overrides: Any) -> Config:
    """Returns the configuration, or what a file or nested values make one, with `overrides`."""
    config = _resolved(config, overrides)
    if config.policy.auto:
        _log.warning(
            "%s: `auto` is the default preset's value in a session, which predicts no times; "
            "`offload plan --write` writes what is faster",
            ", ".join(f"`policy.{key}`" for key in sorted(config.policy.auto)),
        )
    return config.settled()


def _resolved(config: Config | Mapping[str, Any] | str | Path | None, overrides: Any) -> Config:
    if isinstance(config, Config):
        if not overrides:
            return config
        return build_config(config.model_dump(exclude_unset=False), overrides=overrides)
    if isinstance(config, (str, Path)):
        values = load_config(config).model_dump()
        return build_config(values, overrides=overrides)
    return build_config(config, overrides=overrides, source="Session")


def path_list(paths: str | Path | Sequence[str | Path] | None) -> list[str] | None:
    """Returns one path or several as text."""
    if paths is None:
        return None
    return [str(paths)] if isinstance(paths, (str, Path)) else [str(path) for path in paths]


def size_bytes(value: str | int | None) -> int | None:
    """Returns a size, such as `"4GiB"`, in bytes."""
    return parse_size(value) if isinstance(value, str) else value
