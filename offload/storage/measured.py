"""The settings of the I/O engine that were measured to be best for a directory."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offload.errors import ConfigError, StorageError
from offload.plan.machine_profile import MachineProfile, read_profile
from offload.storage.path_queues import open_backend
from offload.storage.paths import PathSettings

_LOGGER = logging.getLogger("offload.storage")


def nominal_rates(
    directories: Sequence[Path],
    *,
    probed: Sequence[float] = (),
    limits: Sequence[int | None] = (),
    profile: MachineProfile | None = None,
) -> tuple[float | None, ...]:
    """Returns bytes that go in and out again each second on each path, by the machine's profile.

    Args:
        directories: One on each path; they need not exist.
        probed: What a run measured at its start: taken where the profile lacks one of the paths,
            as rates of two measurements say little about each other.
        limits: Bytes/s of both directions together that a path is held to.
        profile: None reads the machine's own.
    """
    known = read_profile() if profile is None else profile
    found = [known.find(directory) for directory in directories]
    rates = [None if each is None else each.mixed_bytes_per_s for each in found]
    if None in rates and len(probed) == len(rates):
        rates = list(probed)
    held = [*limits, *[None] * (len(rates) - len(limits))]
    return tuple(
        rate if rate is None or limit is None else min(rate, limit / 2)
        for rate, limit in zip(rates, held, strict=True)
    )


def measured_settings(
    directory: Path, *, profile: MachineProfile | None = None
) -> tuple[PathSettings, ...]:
    """Returns the settings for files below `directory`; empty if nothing was measured there.

    Args:
        directory: Of a store; it need not exist.
        profile: None reads the machine's own.
    """
    known = (read_profile() if profile is None else profile).find(directory)
    if known is None:
        return ()
    settings = PathSettings(
        root=directory,
        backend=known.backend,
        queue_depth=known.queue_depth,
        block_bytes=known.block_bytes,
    )
    try:
        settings.check()
    except ConfigError as error:
        raise ConfigError(
            f"cannot use what the machine profile has of path `{known.path}`: {error}; or measure "
            "it again with `offload bench io --tune`"
        ) from error
    try:
        open_backend(settings).close()
    except StorageError as error:
        _LOGGER.warning(
            "I/O on path `%s` does not use the backend `%s` that was measured to be best: %s",
            directory,
            known.backend,
            error,
        )
        settings = replace(settings, backend="auto")
    return (settings,)
