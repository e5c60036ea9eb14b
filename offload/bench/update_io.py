"""The I/O engines of `offload bench update`, as runs on the same paths have them."""

from offload.bench.update_options import UpdateOptions
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings


def engines_of(options: UpdateOptions) -> list[Engine]:
    """Returns one for each path, closed: with the settings measured to be best, if any were."""
    if options.faults:
        return [Engine(backend="fault", faults=plan) for plan in options.faults]
    return [Engine(paths=measured_settings(path)) for path in options.paths]
