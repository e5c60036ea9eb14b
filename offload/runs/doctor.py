"""Checks a machine and its paths for what a run needs."""

from collections.abc import Sequence
from pathlib import Path

from offload.runs.checks import DoctorReport
from offload.runs.machine_checks import limit_checks, software_checks
from offload.runs.path_checks import drain_check, path_checks


def run_checks(paths: Sequence[Path], *, drain: Path | None = None) -> DoctorReport:
    """Returns what is found of the software, the limits, and each of `paths`.

    Nothing is left on the paths.

    Args:
        paths: Directories for a store.
        drain: Where checkpoints are to be copied.
    """
    checks = [*software_checks(), *limit_checks()]
    for path in paths:
        checks.extend(path_checks(path.absolute()))
    checks.append(drain_check(drain, [path.absolute() for path in paths]))
    return DoctorReport(checks=checks)
