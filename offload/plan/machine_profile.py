"""The measured profile of a machine's paths, `machine.toml`: its text and where it is found."""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

SCHEMA = 1
MARK = "# written by `offload bench io --tune`"
"""The first line of every such file: one that begins otherwise is not ours to replace."""
VARIABLE = "OFFLOAD_MACHINE"
"""The environment variable that names another file; empty: none is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathProfile:
    """What was measured on one path, and the settings of the I/O engine that were best."""

    path: str
    backend: str
    block_bytes: int
    queue_depth: int
    direct: bool
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Bytes in and as many out at the same time, each per second."""
    measured_at: str
    sustained_write_bytes_per_s: float | None = None
    """Of a long stream of writes, where that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """The profiles of all paths that were measured on this machine."""

    paths: tuple[PathProfile, ...] = ()

    def find(self, directory: str | os.PathLike[str]) -> PathProfile | None:
        """Returns the profile of the path that `directory` lies on: the nearest one above it."""
        known = {profile.path: profile for profile in self.paths}
        absolute = Path(os.path.abspath(directory))
        for candidate in (absolute, *absolute.parents):
            if str(candidate) in known:
                return known[str(candidate)]
        return None

    def with_paths(self, measured: Iterable[PathProfile]) -> "MachineProfile":
        """Returns a profile in which `measured` take the place of what was known of them."""
        merged = {profile.path: profile for profile in (*self.paths, *measured)}
        return MachineProfile(paths=tuple(merged.values()))

    def to_toml(self) -> str:
        """Returns the text of the file."""
        lines = [MARK, f"schema = {SCHEMA}"]
        for profile in self.paths:
            lines += ["", "[[paths]]"]
            for each in fields(profile):
                value = getattr(profile, each.name)
                if value is not None:
                    # What JSON writes of text, integers, floats and booleans is TOML too.
                    lines.append(f"{each.name} = {json.dumps(value)}")
        return "\n".join(lines) + "\n"


def parse_profile(text: str, *, source: str) -> MachineProfile:
    """Returns the profile that `text` holds.

    Raises:
        ConfigError: It is not one, or of a newer version.
    """
    try:
        values = tomllib.loads(text)
        if values.get("schema") != SCHEMA:
            raise ValueError(f"`schema` is {values.get('schema')!r}")
        paths = tuple(_parse_path(each) for each in values.get("paths", []))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read the machine profile `{source}`: expected a file of schema {SCHEMA} from "
            f"`offload bench io --tune`, found that {error}; measure again or remove the file"
        ) from error
    return MachineProfile(paths=paths)


def default_file() -> Path | None:
    """Returns where the profile is kept: `$OFFLOAD_MACHINE`, else in the user's configuration."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(base) / "offload" / "machine.toml"


def read_profile(file: Path | None = None) -> MachineProfile:
    """Returns the profile in `file`, or in the default one, which may be missing.

    Raises:
        ConfigError: It is not one, or the named file is missing.
    """
    source = file or default_file()
    if source is None:
        return MachineProfile()
    try:
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if file is None:
            return MachineProfile()
        raise _unreadable(source, error) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(source, error) from error
    return parse_profile(text, source=str(source))


def _unreadable(source: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot read the machine profile `{source}`: expected a text file, found {error}; "
        "name another file or measure one with `offload bench io --tune`"
    )


def _parse_path(values: Mapping[str, Any]) -> PathProfile:
    kinds: dict[str, tuple[type, ...]] = {
        "path": (str,),
        "backend": (str,),
        "measured_at": (str,),
        "direct": (bool,),
        "block_bytes": (int,),
        "queue_depth": (int,),
    }
    known = {each.name for each in fields(PathProfile)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"`{unknown[0]}` of a path is not known")
    for name, value in values.items():
        number = (int, float)
        if not isinstance(value, kinds.get(name, number)):
            raise ValueError(f"`{name}` is {value!r}")
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise ValueError(f"`{name}` is {value!r}, which is not positive")
    return PathProfile(**values)
