"""The directory of a run: resolved config, plan, `metrics.jsonl`, result and, by default, store."""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.config import Config
from offload.errors import ConfigError, StorageError
from offload.storage.ownership import RUN_OWNER_FILE
from offload.storage.summary import has_commit

AUTO = "auto"

Resume = str | Path | None
"""`auto`, or the directory of a run that is to go on."""

STORE = "store"
CONFIG_FILE = "config.toml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"

_FILES = (CONFIG_FILE, PLAN_FILE, METRICS_FILE, RESULT_FILE)
_DEFAULT_PARENT = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Where a run keeps its files, and whether it goes on from a commit in it."""

    path: Path
    stores: tuple[Path, ...]
    """The store's directories, one on each path."""
    is_resumed: bool
    copied_from: Path | None = None
    """A copied checkpoint that the new store starts from."""

    @property
    def store(self) -> Path:
        """The store's directory on the first path."""
        return self.stores[0]

    @property
    def resume_options(self) -> str:
        """What goes on with the run, as a shell takes it."""
        return f"--run-dir {shlex.quote(str(self.path))} --resume auto"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS_FILE

    def prepare(self, config: Config, *, plan: Mapping[str, Any]) -> None:
        """Writes config and plan; a new run drops what an aborted start left.

        The directory is there, and this process owns it.

        Raises:
            StorageError: A file can't be written.
        """
        try:
            if not self.is_resumed:
                for name in _FILES:
                    (self.path / name).unlink(missing_ok=True)
            _write(self.path / CONFIG_FILE, config.to_toml())
            _write_json(
                self.path / PLAN_FILE,
                {**plan, "store": str(self.store), "stores": list(map(str, self.stores))},
            )
        except OSError as error:
            raise StorageError(
                f"cannot prepare run directory `{self.path}`: expected to write files there, "
                f"found {error.strerror or error}; choose another `--run-dir`",
                errno=error.errno,
            ) from error

    def write_result(self, result: Mapping[str, Any], *, has_steps: bool) -> None:
        """Writes the result of the run beside its metrics.

        One without steps does not replace that of the steps that the run has.

        Raises:
            StorageError: It can't be written.
        """
        file = self.path / RESULT_FILE
        if not has_steps and file.exists():
            return
        try:
            _write_json(file, result)
        except OSError as error:
            raise StorageError(
                f"cannot write `{file}`: expected room for the result of a run that has ended, "
                f"found {error.strerror or error}; free some: what was committed stays",
                errno=error.errno,
            ) from error


def resolve_run_directory(
    config: Config, *, run_dir: str | Path | None, resume: Resume
) -> RunDirectory:
    """Returns where the run goes and whether it resumes. Writes nothing.

    Args:
        config: Its storage path, if it has one, holds the store.
        run_dir: None for a new directory under `runs/`, or for the one that `resume` names.
        resume: `auto` starts from the beginning where there is no complete commit; a path must
            hold one.

    Raises:
        ConfigError: The directory is in use without `resume`, or holds no complete commit.
    """
    named = None if resume is None or resume == AUTO else Path(resume)
    if named is not None and run_dir is not None and _is_copy(named, Path(run_dir)):
        path = Path(run_dir).absolute()
        _require_unused(path)
        stores = _new_stores(config, path)
        return RunDirectory(path=path, stores=stores, is_resumed=True, copied_from=named.absolute())
    path = _run_path(Path(run_dir) if run_dir is not None else None, named, resume)
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"cannot use run directory `{path}`: expected a directory, found a file; "
            "choose another `--run-dir`"
        )
    if resume is None:
        _require_unused(path)
    wanted, found = _new_stores(config, path), find_stores(path)
    # Damage raises: where there are manifests and none is whole, nothing is started anew.
    is_resumed = resume is not None and (has_commit(*wanted) or bool(found and has_commit(*found)))
    if named is not None and not named.exists():
        raise ConfigError(
            f"cannot resume from `{named}`: expected the directory of a run or of a store, found "
            "none; check the path"
        )
    if named is not None and not is_resumed:
        raise ConfigError(
            f"cannot resume from `{named}`: expected a complete commit in store "
            f"`{(found or wanted)[0]}`, found none; start without `--resume`, or with "
            "`--resume auto`"
        )
    is_moved = is_resumed and not has_commit(*wanted)
    return RunDirectory(path=path, stores=found if is_moved else wanted, is_resumed=is_resumed)


def find_stores(path: Path) -> tuple[Path, ...]:
    """Returns the store's directories that the run directory `path` names; none where none."""
    try:
        plan = json.loads((path / PLAN_FILE).read_text(encoding="utf-8"))
        stores = plan.get("stores") or [plan["store"]]
    except (OSError, ValueError, AttributeError, KeyError):
        return ()
    if not isinstance(stores, list) or not all(isinstance(store, str) for store in stores):
        return ()
    # A run directory that was moved or copied takes the store in it along.
    own = path / STORE
    if len(stores) == 1 and own.exists():
        return (own,)
    return tuple(map(Path, stores))


def is_run_directory(path: Path) -> bool:
    """Returns whether a run has been started in `path`."""
    return (path / CONFIG_FILE).is_file() and (path / PLAN_FILE).is_file()


def _run_path(run_dir: Path | None, named: Path | None, resume: Resume) -> Path:
    if named is not None:
        return _named_run(named, run_dir)
    if run_dir is not None:
        return run_dir.absolute()
    if resume == AUTO:
        raise ConfigError(
            "cannot resume: expected `--run-dir` with `--resume auto`, found none; "
            "name the directory of the run"
        )
    return _unused_default()


def _is_copy(named: Path, run_dir: Path) -> bool:
    """Returns whether `named` is a store of its own, from which a run in `run_dir` is to start."""
    named, run_dir = named.absolute(), run_dir.absolute()
    is_of_run = is_run_directory(named) or is_run_directory(named.parent)
    return not is_of_run and run_dir not in (named, named.parent) and has_commit(named)


def _named_run(named: Path, run_dir: Path | None) -> Path:
    path = named.absolute()
    if not is_run_directory(path) and is_run_directory(path.parent):
        path = path.parent  # the store inside a run directory
    if run_dir is not None and run_dir.absolute() not in (path, named.absolute()):
        raise ConfigError(
            f"cannot resume from `{named}` in run directory `{run_dir}`: expected the same "
            "directory, found two; leave out `--run-dir`"
        )
    return path


def _unused_default() -> Path:
    stem = _DEFAULT_PARENT.absolute() / time.strftime("%Y%m%d-%H%M%S")
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def _require_unused(path: Path) -> None:
    try:
        names = {each.name for each in path.iterdir()} if path.is_dir() else set()
    except OSError as error:
        raise ConfigError(
            f"cannot use run directory `{path}`: expected a readable directory, found "
            f"{error.strerror or error}; choose another `--run-dir`"
        ) from error
    if names - {RUN_OWNER_FILE}:
        raise ConfigError(
            f"cannot start in run directory `{path}`: expected a new or empty directory, found "
            "files in it; add `--resume auto` to go on, or choose another `--run-dir`"
        )


def _new_stores(config: Config, path: Path) -> tuple[Path, ...]:
    paths = config.tiers.storage.paths
    if not paths:
        return (path / STORE,)
    # Runs that share a path stay apart; the same run finds its store again.
    tag = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    return tuple(Path(root) / f"offload-{path.name}-{tag}" for root in paths)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write(path, json.dumps(value, indent=2) + "\n")
