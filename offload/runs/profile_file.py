"""The file of the machine's profile: what is measured is added to what is known."""

from pathlib import Path

from offload.plan.machine_profile import MARK, VARIABLE, MachineProfile, parse_profile
from offload.runs.own_file import OwnFile


def add_to_profile(file: Path, measured: MachineProfile) -> None:
    """Writes `measured` into `file`, in place of what it has of the same things.

    Raises:
        ConfigError: The file is not one that this wrote, or cannot be written.
    """
    _own(file).write(read_own(file).merged(measured).to_toml())


def require_writable(file: Path) -> None:
    """Makes sure that `add_to_profile` can write the file, which stays as it is.

    Raises:
        ConfigError: It could not.
    """
    read_own(file)
    _own(file).require_writable()


def read_own(file: Path) -> MachineProfile:
    """Returns the profile in `file`, an empty one where there is none.

    Raises:
        ConfigError: The file is not one that `add_to_profile` wrote, and it would refuse.
    """
    text = _own(file).read()
    return MachineProfile() if text is None else parse_profile(text, source=str(file))


def _own(file: Path) -> OwnFile:
    return OwnFile(
        path=file,
        what="the machine profile",
        mark=MARK,
        remedy=f"make it writable or name another one with `--machine` or `{VARIABLE}`",
        makes_directory=True,
    )
