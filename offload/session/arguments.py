"""The arguments of a session and of `wrap`: what they may be, as values of a configuration."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from offload.config import Config, build_config, load_config
from offload.devices import Device
from offload.errors import ConfigError, StoreError
from offload.sizes import parse_size
from offload.streaming.discovery import require_no_scripts
from offload.streaming.swap import is_attached

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


def device_bytes(value: str | int | None, device: Device) -> int | None:
    """Returns a model's part of the device's memory in bytes.

    Raises:
        ConfigError: There is one on a device that has no memory of its own.
    """
    if value is not None and device.is_unified:
        raise ConfigError(
            "cannot give a model `device_memory` on a device that computes in host memory: "
            f"expected none, found `{value}`; pass `host_memory`"
        )
    return size_bytes(value)


def require_plain(model: object) -> None:
    """Checks that `model` is one of torch's, which no session has wrapped.

    Raises:
        ConfigError: It is no module, or a module in it is a script.
        StoreError: It is wrapped.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"cannot wrap `{type(model).__name__}`: expected a torch.nn.Module; pass the model"
        )
    require_no_scripts(model)
    if any(map(is_attached, model.modules())):
        raise StoreError(
            "cannot wrap a model that another session has wrapped: expected a plain model; "
            "close that session, or build another model"
        )
