"""The measured profile of a machine, `machine.toml`: its text and where it is found."""

import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from offload.errors import ConfigError
from offload.layout.units import TRANSFER_ALIGNMENT

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

    def held_to(self, limit_bytes_per_s: int | None) -> "PathProfile":
        """Returns the profile where both directions together may be no more; None: as is."""
        if limit_bytes_per_s is None:
            return self
        return replace(
            self,
            read_bytes_per_s=min(self.read_bytes_per_s, limit_bytes_per_s),
            write_bytes_per_s=min(self.write_bytes_per_s, limit_bytes_per_s),
            mixed_bytes_per_s=min(self.mixed_bytes_per_s, limit_bytes_per_s / 2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """The fused pass over operands in memory."""

    rule: str
    codec: str
    dtype: str
    """Of the parameters."""
    threads: int
    parameters_per_s: float
    measured_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Copies within memory."""

    threads: int
    copy_bytes_per_s: float
    """Bytes read plus bytes written."""
    measured_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassProfile:
    """A micro-step of models of one shape: a part that each has, and one for each layer."""

    shape: str
    """All that its time depends on, as text."""
    threads: int
    forward_s: float
    forward_layer_s: float
    backward_s: float
    backward_layer_s: float
    other_s: float
    """Of a step: what is neither pass nor update."""
    other_layer_s: float
    activation_bytes: float
    activation_layer_bytes: float
    measured_at: str
    workspace_bytes: float | None = None
    """Resident memory of passes beside activations: gradients on their way, workspaces of
    libraries, holes of the heap. None where the kernel did not tell."""
    workspace_layer_bytes: float | None = None
    record_s: float | None = None
    """Of an update, for each record, beside the fused pass; None where it was not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProfile:
    """A micro-step of one model, as it took in a run."""

    shape: str
    """All that its time depends on, as text."""
    threads: int
    forward_s: float
    backward_s: float
    other_s: float
    """Of a step: what is neither pass nor update."""
    activation_bytes: float
    measured_at: str
    workspace_bytes: float | None = None
    """As of `PassProfile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What was measured on this machine; each part may be missing."""

    paths: tuple[PathProfile, ...] = ()
    kernels: tuple[KernelProfile, ...] = ()
    memory: tuple[MemoryProfile, ...] = ()
    """One for each number of threads."""
    passes: tuple[PassProfile, ...] = ()
    runs: tuple[RunProfile, ...] = ()

    def find(self, directory: str | os.PathLike[str]) -> PathProfile | None:
        """Returns the profile of the path that `directory` lies on: the nearest one above it."""
        known = {profile.path: profile for profile in self.paths}
        absolute = Path(os.path.abspath(directory))
        for candidate in (absolute, *absolute.parents):
            if str(candidate) in known:
                return known[str(candidate)]
        return None

    def find_kernel(
        self, *, rule: str, codec: str, dtype: str, threads: int
    ) -> KernelProfile | None:
        """Returns what was measured of one kind of update."""
        wanted = (rule, codec, dtype, threads)
        found = (k for k in self.kernels if (k.rule, k.codec, k.dtype, k.threads) == wanted)
        return next(found, None)

    def find_memory(self, *, threads: int) -> MemoryProfile | None:
        """Returns what was measured of copies with so many threads."""
        return next((each for each in self.memory if each.threads == threads), None)

    def find_passes(self, shape: str, *, threads: int) -> PassProfile | None:
        """Returns what was measured of passes of one shape."""
        found = (p for p in self.passes if (p.shape, p.threads) == (shape, threads))
        return next(found, None)

    def find_run(self, shape: str, *, threads: int) -> RunProfile | None:
        """Returns what runs showed of one model."""
        found = (run for run in self.runs if (run.shape, run.threads) == (shape, threads))
        return next(found, None)

    def merged(self, newer: "MachineProfile") -> "MachineProfile":
        """Returns a profile in which what `newer` has takes the place of what was known."""
        return MachineProfile(
            paths=_newest(self.paths + newer.paths, lambda each: each.path),
            kernels=_newest(
                self.kernels + newer.kernels,
                lambda each: (each.rule, each.codec, each.dtype, each.threads),
            ),
            memory=_newest(self.memory + newer.memory, lambda each: each.threads),
            passes=_newest(self.passes + newer.passes, lambda each: (each.shape, each.threads)),
            runs=_newest(self.runs + newer.runs, lambda each: (each.shape, each.threads)),
        )

    def to_toml(self) -> str:
        """Returns the text of the file."""
        lines = [MARK, f"schema = {SCHEMA}"]
        for table in _TABLES:
            for profile in getattr(self, table):
                lines += ["", f"[[{table}]]"]
                for each in fields(profile):
                    value = getattr(profile, each.name)
                    if value is not None:
                        # What JSON writes of text, integers, floats and booleans is TOML too.
                        lines.append(f"{each.name} = {json.dumps(value)}")
        return "\n".join(lines) + "\n"


_TABLES: dict[str, type[Any]] = {
    "paths": PathProfile,
    "kernels": KernelProfile,
    "memory": MemoryProfile,
    "passes": PassProfile,
    "runs": RunProfile,
}
_Profile = TypeVar("_Profile")


def _newest(
    profiles: Iterable[_Profile], key: Callable[[_Profile], object]
) -> tuple[_Profile, ...]:
    """Returns the last profile of each key, in the order in which keys appear."""
    return tuple({key(profile): profile for profile in profiles}.values())


def parse_profile(text: str, *, source: str) -> MachineProfile:
    """Returns the profile that `text` holds.

    Raises:
        ConfigError: It is not one, or of a newer version.
    """
    try:
        values = tomllib.loads(text)
        if values.get("schema") != SCHEMA:
            raise ValueError(f"`schema` is {values.get('schema')!r}")
        for name in sorted(values.keys() - {"schema", *_TABLES}):
            raise ValueError(f"`{name}` is not known")
        tables = {
            name: tuple(_parse(kind, each) for each in values.get(name, []))
            for name, kind in _TABLES.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read the machine profile `{source}`: expected a file of schema {SCHEMA} from "
            f"`offload bench io --tune`, found that {error}; measure again or remove the file"
        ) from error
    return MachineProfile(**tables)


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


_MOST = 1e24
"""Of anything. With rates between this and 1 the times of all that is planned stay finite."""
_CLAIMS = ("direct",)
_COUNTS = ("block_bytes", "queue_depth", "threads")
_TEXTS = ("path", "backend", "measured_at", "rule", "codec", "dtype", "shape")


def _parse(kind: type[Any], values: Mapping[str, Any]) -> Any:
    known = {each.name for each in fields(kind)}
    needed = {each.name for each in fields(kind) if each.default is MISSING}
    for name in sorted(values.keys() - known):
        raise ValueError(f"`{name}` of `{kind.__name__}` is not known")
    for name in sorted(needed - values.keys()):
        raise ValueError(f"`{name}` of `{kind.__name__}` is missing")
    for name, value in values.items():
        if not isinstance(value, _type_of(name)):
            raise ValueError(f"`{name}` is {value!r}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            may_be_nothing = kind in (PassProfile, RunProfile)
            if not (math.isfinite(value) and value >= 0) or (value == 0 and not may_be_nothing):
                raise ValueError(f"`{name}` is {value!r}, which is not finite and positive")
            least = 1 if name.endswith("_per_s") else 0
            if not least <= value <= _MOST:
                raise ValueError(f"`{name}` is {value!r}, which is not from {least} to {_MOST:g}")
            if name == "block_bytes" and value % TRANSFER_ALIGNMENT:
                raise ValueError(f"`{name}` is {value}, no multiple of {TRANSFER_ALIGNMENT}")
    return kind(**values)


def _type_of(name: str) -> tuple[type, ...]:
    if name in _TEXTS:
        return (str,)
    if name in _CLAIMS:
        return (bool,)
    return (int,) if name in _COUNTS else (int, float)
