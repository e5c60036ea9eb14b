"""Owning a run directory, so that two runs that start at once do not write into each other's."""

from collections.abc import Iterator
from contextlib import contextmanager

from offload.config import Config
from offload.errors import StorageError, StoreError
from offload.runs.run_directory import Resume, RunDirectory, resolve_run_directory
from offload.storage.ownership import RUN_OWNER_FILE, Ownership


@contextmanager
def owning(
    config: Config, directory: RunDirectory, *, is_named: bool, resume: Resume
) -> Iterator[RunDirectory]:
    """Makes the run directory, and yields it while this process alone may write there.

    Args:
        config: Of the run.
        directory: As it was resolved; what it holds is asked again now that it is owned.
        is_named: Whether the user named it; else, where another has taken it, there are more.
        resume: As `resolve_run_directory` has it.

    Raises:
        StoreError: Another process has it, or had it since it was resolved.
        ConfigError: Another run has begun in it.
        StorageError: It can't be made.
    """
    directory = _made(config, directory, is_named=is_named)
    ownership = Ownership(directory.path, file=RUN_OWNER_FILE)
    ownership.acquire()
    try:
        found = resolve_run_directory(config, run_dir=directory.path, resume=resume)
        if found != directory:
            raise StoreError(
                f"cannot start in run directory `{directory.path}`: expected it as it was when the "
                "run was planned, found that another run has written there; start again",
                is_refusal=True,
            )
        yield directory
    finally:
        ownership.release(deletes=True)


def _made(config: Config, directory: RunDirectory, *, is_named: bool) -> RunDirectory:
    while True:
        try:
            directory.path.mkdir(mode=0o700, parents=True, exist_ok=is_named)
        except FileExistsError as error:
            if is_named:
                raise _cannot_make(directory, error) from error
            directory = resolve_run_directory(config, run_dir=None, resume=None)
        except OSError as error:
            raise _cannot_make(directory, error) from error
        else:
            return directory


def _cannot_make(directory: RunDirectory, error: OSError) -> StorageError:
    return StorageError(
        f"cannot make run directory `{directory.path}`: expected to write there, found "
        f"{error.strerror or error}; choose another `--run-dir`",
        errno=error.errno,
    )
