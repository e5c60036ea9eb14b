"""Scenarios: machines that are not here and the runs on them, as `offload simulate` reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from offload.config.fields import (
    Count,
    CountOrZero,
    OrderName,
    Overlap,
    Section,
    Size,
    StripingName,
)
from offload.config.loading import read_toml
from offload.config.messages import describe_errors
from offload.config.schema import Config
from offload.errors import ConfigError

System = Literal["engine", "deepspeed-like", "mlp-like"]


def _as_float(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Rate = Annotated[float, BeforeValidator(_as_float), Field(gt=0)]
"""Something per second."""
Share = Annotated[float, BeforeValidator(_as_float), Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class ScenarioPath(Section):
    """A kind of storage that each node has, or that all of them share."""

    name: str
    """By which runs and the fit refer to it."""
    read_bytes_per_s: Rate
    """Of one node's reads alone."""
    write_bytes_per_s: Rate
    """Of one node's writes alone."""
    duplex: Share = 0.0
    """0: both directions share one rate; 1: neither slows the other."""
    shared_read_bytes_per_s: Rate | None = None
    """Of all nodes together, where they share it."""
    shared_write_bytes_per_s: Rate | None = None
    """Of all nodes together, where they share it."""


class ScenarioMachine(Section):
    """One node; all nodes are equal."""

    gpus: CountOrZero = 0
    """0: passes run on the cores that update."""
    device_memory: Size | None = None
    """Of each GPU; None: not asked about."""
    host_memory: Size | None = None
    """Of the node; None: not asked about."""
    link_bytes_per_s: Rate | None = None
    """Between the host and each GPU, each way."""
    flops_per_s: Rate | None = None
    """Of each GPU as reached, or of the cores without one; None: passes take no time."""
    update_parameters_per_s: Rate = 2e9
    """The fused pass on all cores, in memory."""
    copy_bytes_per_s: Rate = 2e11
    """Bytes read plus bytes written per second of a copy in memory."""
    paths: Annotated[tuple[ScenarioPath, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    """Its storage."""


class ScenarioFit(Section):
    """The one published run that sets the paths' rates; their ratios stay."""

    run: str
    """The name of the run."""
    update_s: Rate
    """Its measured update."""
    paths: Names
    """Which rates are scaled, all by one factor."""


class ScenarioPolicy(Section):
    """The engine's choices in a run."""

    parameters: Literal["device", "host", "storage"] = "host"
    """Where parameters live between uses."""
    codec: Literal["split", "fp32"] = "split"
    """How the state is encoded."""
    order: OrderName = "alternating"
    """Which record is updated next."""
    overlap: Overlap = "none"
    """What updates run under."""
    striping: StripingName = "adaptive"
    """How blocks are spread over paths."""
    prefetch: CountOrZero = 2
    """Units fetched ahead of use."""


class ScenarioRun(Section):
    """One model under one system on some nodes."""

    name: str
    """For the table; the fit refers to it."""
    system: System = "engine"
    """`"engine"`, or a baseline: what moves there is described in the documentation."""
    parameters: Rate
    """Trainable bf16 parameters of each node's share of the model."""
    layers: Annotated[int, Field(gt=0, le=100_000)] = 32
    """Decoder blocks, all alike."""
    nodes: Count = 1
    """How many share what is shared."""
    gpus: CountOrZero | None = None
    """Of each node; None: the machine's."""
    paths: Names = ()
    """Which of the machine's are used; empty: all."""
    tokens: CountOrZero = 0
    """Of a node in each micro-step."""
    micro_steps: Count = 1
    """Forward and backward passes in each step."""
    host_budget: Size | None = None
    """What the engine may use of a node's memory; the cache is what is left."""
    cache_fraction: Share | None = None
    """Instead of a budget: the fraction of the state that stays in memory."""
    cache_memory: Size | None = None
    """Instead of a budget: bytes of state that stay in memory."""
    subgroup_parameters: Rate | None = None
    """Of one record; None: 100 million for a baseline, the engine's own for the engine."""
    policy: ScenarioPolicy = ScenarioPolicy()
    """Of the engine."""
    published_update_s: Rate | None = None
    """What was measured and published, to compare with."""
    like: str | None = None
    """The name of a run whose step this one's is compared with."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [
            key
            for key in ("host_budget", "cache_fraction", "cache_memory")
            if getattr(self, key) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"expected one of {', '.join(given)}, found all of them")
        return self


class Scenario(Section):
    """A machine, what was measured on it, and the runs to simulate."""

    title: str = ""
    """One line."""
    source: str = ""
    """Where the figures come from."""
    machine: ScenarioMachine
    """One node."""
    fit: ScenarioFit | None = None
    """None: rates are as written."""
    runs: Annotated[tuple[ScenarioRun, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    """In the order of the table."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = {path.name for path in self.machine.paths}
        names = [run.name for run in self.runs]
        wanted = [(f"runs.{run.name}.paths", path) for run in self.runs for path in run.paths]
        wanted += [("fit.paths", path) for path in (self.fit.paths if self.fit else ())]
        for key, path in wanted:
            if path not in known:
                raise ValueError(f"`{key}` names `{path}`: expected one of {sorted(known)}")
        if len(set(names)) != len(names):
            raise ValueError("expected each run to have a name of its own")
        for name in [self.fit.run if self.fit else None, *(run.like for run in self.runs)]:
            if name is not None and name not in names:
                raise ValueError(f"expected a run named `{name}`, found {names}")
        return self


def load_scenario(path: str | Path) -> Scenario:
    """Returns the scenario in the file `path`.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong.
    """
    values = read_toml(Path(path), what="scenario")
    _refuse_run(values, path)
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            describe_errors(error, source=f"scenario `{path}`", schema=Scenario)
        ) from error


def _refuse_run(values: Mapping[str, Any], path: str | Path) -> None:
    """Raises ConfigError for the configuration of a run, which is easily taken for a scenario."""
    found = [f"`{key}`" for key in values if key in Config.model_fields]
    if found and not values.keys() & Scenario.model_fields.keys():
        raise ConfigError(
            f"cannot use scenario `{path}`: expected `machine` and `runs`, found {', '.join(found)}"
            f", as in the configuration of a run; use `offload plan {path}`"
        )
