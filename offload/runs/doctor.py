"""Checks a machine and its paths for what a run needs."""

from collections.abc import Sequence
from pathlib import Path

from offload.runs.checks import DoctorReport
from offload.runs.machine_checks import limit_checks, software_checks
from offload.runs.path_checks import path_checks


def run_checks(paths: Sequence[Path]) -> DoctorReport:
    """Returns what is found of the software, the limits, and each of `paths`.

    Nothing is left on the paths.
    """
    checks = [*software_checks(), *limit_checks()]
    for path in paths:
        checks.extend(path_checks(path.absolute()))
    return DoctorReport(checks=checks)
