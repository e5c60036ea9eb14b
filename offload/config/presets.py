"""Named choices of a policy, shipped as TOML files."""

import difflib
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

DEFAULT_PRESET = "laptop"


def resolve_policy(policy: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the choices that `policy` makes, the default preset's where it makes none.

    Args:
        policy: The name of a preset, a TOML file (a `Path`, or text with a `/` or ending in
            `.toml`), the choices themselves, or None for the default preset.

    Raises:
        ConfigError: There is no such preset or file, or it is not TOML.
    """
    defaults = _read_preset(DEFAULT_PRESET)
    if policy is None:
        return defaults
    if isinstance(policy, Mapping):
        return defaults | dict(policy)
    if isinstance(policy, Path) or "/" in policy or policy.endswith(".toml"):
        return defaults | _parse(str(policy), _read_file(policy))
    return defaults | _read_preset(policy)


def preset_names() -> list[str]:
    """Returns the names of the presets that are shipped, sorted."""
    folder = files("offload.policies") / "presets"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def _read_preset(name: str) -> dict[str, Any]:
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "a file needs a `/` or `.toml` in its name"
        raise ConfigError(
            f"cannot resolve `policy`: expected a preset ({', '.join(f'`{n}`' for n in names)}), "
            f"a file or a table, found `{name}`; {hint}"
        )
    resource = files("offload.policies") / "presets" / f"{name}.toml"
    return tomllib.loads(resource.read_text(encoding="utf-8"))


def _read_file(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read policy `{path}`: expected a TOML file, found: {error}; "
            "name a preset or a file that exists"
        ) from error


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"cannot read policy `{name}`: expected TOML, found: {error}; correct that line"
        ) from error
