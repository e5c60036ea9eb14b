"""Reads a configuration from TOML, overrides and presets."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from offload.config.messages import describe_errors, describe_problems, describe_unknown
from offload.config.overrides import apply_overrides, parse_overrides
from offload.config.presets import resolve_policy
from offload.config.schema import Config, PolicyConfig
from offload.config.supported import unsupported_values
from offload.errors import ConfigError

_DEFAULTS = "the defaults"  # the source that messages name


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration in the file `path`, changed by `key=value` overrides.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong or not available.
    """
    changes = parse_overrides(overrides)
    return build_config(
        read_toml(Path(path), what="config"), overrides=changes, source=f"config `{path}`"
    )


def default_config(overrides: Sequence[str] = ()) -> Config:
    """Returns every default, changed by `key=value` overrides.

    A run also needs `tiers.host.memory`, which has no default.

    Raises:
        ConfigError: A key or value is wrong or not available.
    """
    changes = parse_overrides(overrides)
    return _parsed(_merged({}, changes, _DEFAULTS), source=_DEFAULTS, overrides=list(changes))


def open_policy_keys(path: str | Path, overrides: Sequence[str] = ()) -> frozenset[str]:
    """Returns the keys of `policy` that neither the file `path` nor the overrides set.

    A preset or a file that the run names sets all of them.

    Raises:
        ConfigError: The file cannot be read.
    """
    changes = parse_overrides(overrides)
    named = changes.get("policy", read_toml(Path(path), what="config").get("policy", {}))
    if not isinstance(named, Mapping):
        return frozenset()
    given = {key.removeprefix("policy.") for key in changes if key.startswith("policy.")}
    return frozenset(PolicyConfig.model_fields) - named.keys() - given


def build_config(
    values: Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    source: str = "config",
) -> Config:
    """Returns the configuration of nested `values`, changed by `overrides` with dotted keys.

    Args:
        values: Tables as in a file; `policy` may also be a preset's name or a file.
        overrides: Values by dotted key, such as `{"tiers.host.memory": "24GiB"}`.
        source: Where the values come from, for messages.

    Raises:
        ConfigError: A key or value is wrong or not available.
    """
    changes = dict(overrides or {})
    return _validated(
        _merged(values or {}, changes, source), source=source, overrides=list(changes)
    )


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any], source: str) -> dict[str, Any]:
    rest = dict(changes)
    merged = dict(values)
    # A preset is resolved before single choices change it.
    merged["policy"] = _policy(rest.pop("policy", merged.get("policy")), source)
    return apply_overrides(merged, rest)


def _policy(policy: object, source: str) -> dict[str, Any]:
    if policy is not None and not isinstance(policy, str | Path | Mapping):
        raise ConfigError(
            f"{source}, key `policy`: expected a preset's name, a file or a table, "
            f"found `{policy}`; change `policy`"
        )
    return resolve_policy(policy)


def _validated(values: dict[str, Any], *, source: str, overrides: list[str]) -> Config:
    config = _parsed(values, source=source, overrides=overrides)
    # `model` takes any key, as a factory may have arguments of any name.
    extra = [] if config.model.factory else list(config.model.model_extra or {})
    if extra:
        lines = [
            describe_unknown(f"model.{key}", source=source, overrides=overrides) for key in extra
        ]
        raise ConfigError("\n".join(lines))
    problems = list(unsupported_values(config))
    if problems:
        raise ConfigError(describe_problems(problems, source=source, overrides=overrides))
    return config


def _parsed(values: dict[str, Any], *, source: str, overrides: list[str]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        message = describe_errors(error, source=source, overrides=overrides)
        raise ConfigError(message) from error


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """Returns what the file `path` holds.

    Args:
        path: Of the file.
        what: It is, for messages.

    Raises:
        ConfigError: It cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {what} `{path}`: expected a TOML file, found: {error}; name a file that "
            "exists"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read {what} `{path}`: expected TOML in UTF-8, found: {error}; name another "
            "file or save it as UTF-8"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"cannot read {what} `{path}`: expected TOML, found: {error}; correct that line"
        ) from error
