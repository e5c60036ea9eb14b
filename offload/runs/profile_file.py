"""The file of the machine's profile: what is measured is added to what is known."""

import os
from pathlib import Path

from offload.errors import ConfigError
from offload.plan.machine_profile import MARK, MachineProfile, parse_profile


def add_to_profile(file: Path, measured: MachineProfile) -> None:
    """Writes `measured` into `file`, in place of what it has of the same things.

    Raises:
        ConfigError: The file is not one that this wrote.
    """
    merged = read_own(file).merged(measured)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        new.write_text(merged.to_toml(), encoding="utf-8")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


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
