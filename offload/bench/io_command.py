"""The benchmark of paths with the files that it reads and writes."""

from dataclasses import dataclass, replace
from pathlib import Path

from offload.bench.io import OnProgress, run_io_bench
from offload.bench.io_options import IoOptions
from offload.bench.io_plot import write_plot
from offload.bench.io_report import IoReport
from offload.bench.machine_file import profile_to_write, write_profile
from offload.bench.plot_file import plot_file
from offload.plan.machine_profile import MachineProfile, read_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class IoFiles:
    """Where the profile of the machine is kept, and where charts go."""

    machine: Path | None = None
    """None: the default place."""
    plot: Path | None = None


def bench_io(options: IoOptions, *, files: IoFiles, on_progress: OnProgress) -> IoReport:
    """Measures, then writes the profile (`--tune`) and the plot that were asked for.

    Raises:
        ConfigError: A file could not be written, found before anything is measured; or a path is
            too full.
    """
    machine = _machine_file(options, files.machine)
    plot = None if files.plot is None else plot_file(files.plot)
    report = run_io_bench(options, profile=_known(options, files.machine), on_progress=on_progress)
    if machine is not None:
        write_profile(machine, report)
        report = replace(report, machine_file=str(machine))
    if plot is not None:
        write_plot(plot, report)
    return report


def _machine_file(options: IoOptions, named: Path | None) -> Path | None:
    if not options.tune:
        return None
    return profile_to_write(named)


def _known(options: IoOptions, named: Path | None) -> MachineProfile:
    return MachineProfile() if options.tune else read_profile(named)
