"""What a run teaches of its machine: the profile that exists follows what its steps took.

[Note: half way] A run may share its machine with others, and so may the measurement before it.
So a rate that is known moves half way, by ratio, to what the run showed: a wrong one is forgotten
within a few runs, and one bad run does little harm.
"""

import json
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from offload.config import Config
from offload.errors import ConfigError
from offload.plan.bound import ComputeTimes
from offload.plan.machine import Machine, PathRates
from offload.plan.machine_profile import (
    KernelProfile,
    MachineProfile,
    MemoryProfile,
    PathProfile,
    RunProfile,
    default_file,
    read_profile,
)
from offload.plan.run_plan import RunPlan
from offload.runs.profile_file import add_to_profile
from offload.runs.training_run import RunSummary
from offload.sizes import MIB

_LOG = logging.getLogger("offload.runs")
_LEAST_BYTES = 256 * MIB
"""Moved in a step: those of smaller runs show latencies and caches, and no rates."""


def refine_profile(
    config: Config,
    plan: RunPlan,
    summary: RunSummary,
    *,
    machine: Machine | None,
    directories: Sequence[Path],
    activation_bytes: int,
) -> None:
    """Adds what a run showed to the machine's profile, where one exists.

    Args:
        config: Of the run.
        plan: Of the run.
        summary: What it did.
        machine: Its rates, those of paths as the steps show them; None where nothing was stored.
        directories: Of the paths of `machine`.
        activation_bytes: The most at one time.
    """
    file = default_file()
    if file is None or not file.exists():
        return
    recorder = summary.recorder
    moved_bytes = plan.traffic.read_bytes + plan.traffic.write_bytes
    try:
        add_to_profile(
            file,
            refined(
                read_profile(file),
                config,
                threads=torch.get_num_threads(),
                tiled=plan.tiled,
                machine=machine if moved_bytes >= _LEAST_BYTES else None,
                directories=directories,
                kernel_dtype=plan.layout.usual_dtype,
                micro_step=recorder.micro_step(machine),
                other_s=recorder.other_s,
                activation_bytes=activation_bytes,
                workspace_bytes=_workspace_bytes(plan, summary, activation_bytes),
            ),
        )
    except ConfigError as error:  # the run is done: its result must not be lost
        _LOG.warning("the machine's profile was not refined: %s", error)


def _workspace_bytes(plan: RunPlan, summary: RunSummary, activation_bytes: int) -> int | None:
    """Returns what the run's process held beside arenas and activations; None: not known."""
    if not summary.is_rss_peak_exact:
        return None
    grown_bytes = summary.rss_peak_bytes - summary.rss_baseline_bytes
    return max(grown_bytes - plan.held_bytes - activation_bytes, 0)


def run_shape(config: Config, *, tiled: Collection[str] = ()) -> str:
    """Returns all that the passes of a run's own model depend on, as text.

    Args:
        config: Of the run.
        tiled: Names of units that are computed in pieces.
    """
    train, activations = config.train, config.activations
    parts: dict[str, object] = {
        "model": config.model.model_dump(exclude_defaults=True),
        "batch": train.batch,
        "gradients": train.gradient_dtype,
        "clips": bool(train.max_grad_norm),
        "checkpoint": activations.checkpoint,
        "activations": activations.offload if config.offload else "none",
        "device": config.tiers.device.kind,
    }
    if tiled:
        parts["in_pieces"] = sorted(tiled)
    return json.dumps(parts, sort_keys=True, default=str)


def refined(
    known: MachineProfile,
    config: Config,
    *,
    threads: int,
    machine: Machine | None,
    directories: Sequence[Path],
    kernel_dtype: str,
    micro_step: ComputeTimes | None,
    other_s: float | None,
    activation_bytes: int,
    workspace_bytes: int | None = None,
    tiled: Collection[str] = (),
) -> MachineProfile:
    """Returns what of a profile is better known after a run; the rest of it stays.

    Args:
        known: The profile before the run.
        config: Of the run.
        threads: That computed.
        machine: Its rates, those of paths as the steps show them; None where nothing was stored,
            or too little to tell.
        directories: Of the paths of `machine`.
        kernel_dtype: Of the parameters that `machine`'s update rate is of.
        micro_step: What the passes of one took without an update; None where that is not known.
        other_s: Of a step, what is neither pass nor update.
        activation_bytes: The most at one time.
        workspace_bytes: Resident beside arenas and activations; None where that is not known.
        tiled: Names of units that are computed in pieces.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    runs: tuple[RunProfile, ...] = ()
    if micro_step is not None:
        run = RunProfile(
            shape=run_shape(config, tiled=tiled),
            threads=threads,
            forward_s=micro_step.forward_s,
            backward_s=micro_step.backward_s,
            other_s=other_s or 0.0,
            activation_bytes=activation_bytes,
            workspace_bytes=workspace_bytes,
            measured_at=now,
        )
        runs = (_toward(known.find_run(run.shape, threads=threads), run),)
    if machine is None:
        return MachineProfile(runs=runs)
    optimizer = config.optimizer
    kernel = known.find_kernel(
        rule=optimizer.rule, codec=optimizer.codec, dtype=kernel_dtype, threads=threads
    )
    memory = known.find_memory(threads=threads)
    limits = config.tiers.storage.rate_limits_of(len(directories))
    paths = [  # what a path that the run held back gave says nothing of it
        (known.find(directory), rates)
        for directory, rates, limit in zip(directories, machine.paths, limits, strict=True)
        if limit is None
    ]
    return MachineProfile(
        runs=runs,
        kernels=() if kernel is None else (_kernel(kernel, machine, now),),
        memory=() if memory is None else (_memory(memory, machine, now),),
        paths=tuple(_path(path, rates, now) for path, rates in paths if path is not None),
    )


def _kernel(known: KernelProfile, machine: Machine, now: str) -> KernelProfile:
    rate = _half_way(known.parameters_per_s, machine.update_parameters_per_s)
    return replace(known, parameters_per_s=rate, measured_at=now)


def _memory(known: MemoryProfile, machine: Machine, now: str) -> MemoryProfile:
    rate = _half_way(known.copy_bytes_per_s, machine.copy_bytes_per_s)
    return replace(known, copy_bytes_per_s=rate, measured_at=now)


def _path(known: PathProfile, rates: PathRates, now: str) -> PathProfile:
    return replace(
        known,
        read_bytes_per_s=_half_way(known.read_bytes_per_s, rates.read_bytes_per_s),
        write_bytes_per_s=_half_way(known.write_bytes_per_s, rates.write_bytes_per_s),
        mixed_bytes_per_s=_half_way(known.mixed_bytes_per_s, rates.mixed_bytes_per_s),
        measured_at=now,
    )


def _toward(known: RunProfile | None, run: RunProfile) -> RunProfile:
    if known is None:
        return run
    return replace(
        run,
        forward_s=_half_way(known.forward_s, run.forward_s),
        backward_s=_half_way(known.backward_s, run.backward_s),
        other_s=_half_way(known.other_s, run.other_s),
    )


def _half_way(known: float, found: float) -> float:
    """Returns the geometric mean, or what was found where one of both is nothing."""
    return math.sqrt(known * found) if known > 0 and found > 0 else found
