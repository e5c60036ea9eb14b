"""The settings of the I/O engine that were measured to be best for a directory."""

import logging
from dataclasses import replace
from pathlib import Path

from offload.errors import StorageError
from offload.plan.machine_profile import MachineProfile, read_profile
from offload.storage.path_queues import open_backend
from offload.storage.paths import PathSettings

_LOGGER = logging.getLogger("offload.storage")


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
    settings.check()
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
