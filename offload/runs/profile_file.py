"""The file of the machine's profile: what is measured is added to what is known."""

import os
from pathlib import Path

from offload.errors import ConfigError
from offload.plan.machine_profile import MARK, VARIABLE, MachineProfile, parse_profile


def add_to_profile(file: Path, measured: MachineProfile) -> None:
    """Writes `measured` into `file`, in place of what it has of the same things.

    Raises:
        ConfigError: The file is not one that this wrote, or cannot be written.
    """
    _replace(file, read_own(file).merged(measured).to_toml())


def require_writable(file: Path) -> None:
    """Makes sure that `add_to_profile` can write the file, which stays as it is.

    Raises:
        ConfigError: It could not.
    """
    read_own(file)
    _replace(file, None)


def _replace(file: Path, text: str | None) -> None:
    """Puts `text` in the file's place, as a whole; None: only tries what can be tried."""
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(text or "", encoding="utf-8")
            if text is not None:
                new.replace(file)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write the machine profile `{file}`: expected a file that can be replaced, "
            f"found {error.strerror}; make it writable or name another one with `--machine` or "
            f"`{VARIABLE}`"
        ) from error


def read_own(file: Path) -> MachineProfile:
    """Returns the profile in `file`, an empty one where there is none.

    Raises:
        ConfigError: The file is not one that `add_to_profile` wrote, and it would refuse.
    """
    if not file.exists():
        return MachineProfile()
    text = file.read_text(encoding="utf-8", errors="replace")
    if not text.startswith(MARK):
        raise ConfigError(
            f"cannot write the machine profile `{file}`: expected no file or one that begins with "
            f"`{MARK}`, found another one; name another file with `--machine`"
        )
    return parse_profile(text, source=str(file))
