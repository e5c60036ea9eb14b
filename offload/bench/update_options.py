"""What `offload bench update` is asked to measure, and the made-up model that it measures on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offload.errors import ConfigError
from offload.layout import ModelLayout, ParameterFacts, UnitFacts, build_layout
from offload.plan.machine import Machine
from offload.policy import resolve_order, resolve_overlap, resolve_striping
from offload.storage.faults import FaultPlan
from offload.streaming.host_memory import HostMemory

PARAMETER_ELEMENTS = 16 << 20
"""Of one made-up parameter, as large as a weight of a model of some billion parameters."""
DEFAULT_ORDER = "sequential"
DEFAULT_STRIPING = "adaptive"
BASELINES = ("engine", "deepspeed-like", "mlp-like")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """What is measured."""

    parameters: int
    paths: Sequence[Path]
    host_memory_bytes: int
    """Of parameters and gradients (4 bytes for each parameter), window and cache."""
    codec: str = "split"
    order: str = DEFAULT_ORDER
    overlap: str = "none"
    """What updates run under; any but `none` needs order `resident`. Gradients appear one unit
    after the other in the last two thirds of `compute_s`. Under backward the parameters, which stay
    in memory, are written in place: a run would keep the old ones until the step."""
    striping: str = DEFAULT_STRIPING
    baseline: str = "engine"
    """`engine`, or one of the baselines, which have a codec, an order and a split of their own."""
    compute_s: float = 0.0
    """Stands for forward and backward: a third before, two thirds after the loss, sleeping."""
    steps: int = 5
    """Measured, after two that are not."""
    commit_every: int = 0
    """Steps between commits; 0: none."""
    window_bytes: int | None = None
    """Of records that are read, updated and written at one time, at most; None: as of a run."""
    machine: Machine | None = None
    """Rates that are known already; None: they are measured before and after."""
    faults: Sequence[FaultPlan] = ()
    """Of each path, rates and errors that the I/O engine emulates; none: the paths as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBytes:
    """What one path moved in the measured steps."""

    path: str
    read_bytes: int
    write_bytes: int


class Updates(Protocol):
    """One way to update a made-up model whose state is on storage."""

    def before_update(self) -> None:
        """Does what belongs to the end of backward."""

    def update(self, step: int) -> float:
        """Runs the update of a step, from 1, and returns its time."""

    def moved(self) -> list[PathBytes]:
        """Returns what each path moved so far."""

    @property
    def hit_bytes(self) -> int:
        """Bytes of records that were found in memory so far."""

    def digest(self) -> str:
        """Returns the digest of the state."""


def check_options(options: UpdateOptions) -> None:
    """Raises ConfigError for an option that is wrong."""
    _check_paths(options.paths)
    for name in ("parameters", "steps"):
        if getattr(options, name) < 1:
            raise ConfigError(
                f"cannot measure updates with `--{name}` {getattr(options, name)}: expected 1 or "
                "more; change it"
            )
    if not (math.isfinite(options.compute_s) and options.compute_s >= 0):
        raise ConfigError(
            f"cannot measure updates with `--compute-s` {options.compute_s}: expected 0 or more "
            "seconds; change it"
        )
    if options.commit_every < 0:
        raise ConfigError(
            f"cannot measure updates with `--commit-every` {options.commit_every}: expected 0 "
            "(none) or more steps; change it"
        )
    if options.codec not in ("split", "fp32"):
        raise ConfigError(
            f"cannot measure updates with `--codec` {options.codec}: expected `split` or `fp32`; "
            "change it"
        )
    if options.baseline not in BASELINES:
        raise ConfigError(
            f"cannot measure updates with `--baseline` {options.baseline}: expected one of "
            f"{', '.join(f'`{name}`' for name in BASELINES)}; change it"
        )
    if options.baseline == "mlp-like" and len(options.paths) > 2:
        raise ConfigError(
            "cannot measure updates with `--baseline` mlp-like: expected one or two `--path`, as "
            f"it splits 2 : 1, found {len(options.paths)}; leave some out"
        )
    if options.baseline != "engine" and options.commit_every:
        raise ConfigError(
            f"cannot commit with `--baseline` {options.baseline}: it overwrites its state in "
            "place; leave `--commit-every` out"
        )
    resolve_order(options.order)
    # The baselines share as they do, whatever is asked for.
    num_paths = len(options.paths) if options.baseline == "engine" else None
    resolve_striping(options.striping, num_paths=num_paths)
    _check_overlap(options)


def _check_paths(paths: Sequence[Path]) -> None:
    if not paths:
        raise ConfigError(
            "cannot measure updates: expected at least one `--path`, found none; name a directory"
        )
    for path in paths:
        if not path.is_dir():
            raise ConfigError(
                f"cannot measure updates on `{path}`: expected a directory, found "
                f"{'a file' if path.exists() else 'nothing'}; make it or correct `--path`"
            )
    if len({path.resolve() for path in paths}) != len(paths):
        raise ConfigError(
            "cannot measure updates: expected each `--path` once, found "
            f"{', '.join(f'`{path}`' for path in paths)}; name each path once"
        )


def _check_overlap(options: UpdateOptions) -> None:
    resolve_overlap(options.overlap)
    if options.overlap == "none":
        return
    if options.order != "resident" or options.baseline != "engine":
        raise ConfigError(
            f"cannot measure updates with `--overlap` {options.overlap}: expected `--order` "
            f"resident and no baseline, found `{options.order}` and `{options.baseline}`; change "
            "them"
        )


def made_up_layout(num_parameters: int, *, codec: str) -> ModelLayout:
    """Returns the layout of a model of bf16 parameters, cut into weights of equal size."""
    units = []
    for index, first in enumerate(range(0, num_parameters, PARAMETER_ELEMENTS)):
        size = min(PARAMETER_ELEMENTS, num_parameters - first)
        facts = ParameterFacts(name=f"layers.{index:05d}.weight", shape=(size,), dtype="bfloat16")
        units.append(UnitFacts(name=f"layers.{index:05d}", parameters=(facts,)))
    return build_layout(units, codec=codec)


def made_up_values(
    layout: ModelLayout, memory: HostMemory
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns parameters and gradients by shard, in `memory`, the same whenever asked."""
    parameters = memory.flat_parameters(layout)
    gradients: dict[str, torch.Tensor] = {}
    offset = 0
    for shard in layout.shards.values():
        region = memory.gradients[offset : offset + shard.padded_bytes]
        gradients[shard.name] = torch.frombuffer(region, dtype=torch.bfloat16)
        offset += shard.padded_bytes
    generator = torch.Generator().manual_seed(0)
    for tensor in (*parameters.values(), *gradients.values()):
        tensor.normal_(generator=generator)
    return parameters, gradients
