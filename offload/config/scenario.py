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


Rate = Annotated[float, BeforeValidator(_as_float), Field(ge=1, le=1e24)]
"""Something per second. Times of all that may be asked for stay finite."""
Seconds = Annotated[float, BeforeValidator(_as_float), Field(ge=1e-9, le=1e18)]
Number = Annotated[float, BeforeValidator(_as_float), Field(ge=1, le=1e16)]
"""Of parameters."""
Share = Annotated[float, BeforeValidator(_as_float), Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
SUBGROUP_PARAMETERS = 100_000_000
"""Of a baseline's subgroups by default, as DeepSpeed's example configurations set it."""
_MOST_RECORDS = 100_000
"""Of a simulated model: a step of more would take minutes to simulate."""
_MOST_USES = 100_000
"""Of units in the forward passes of a simulated step, likewise."""
_MOST_OF_A_KIND = 1_000_000
"""Of what a scenario counts."""
Few = Annotated[Count, Field(le=_MOST_OF_A_KIND)]
FewOrNone = Annotated[CountOrZero, Field(le=_MOST_OF_A_KIND)]
Tokens = Annotated[CountOrZero, Field(le=10**15)]


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

    gpus: FewOrNone = 0
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
    update_s: Seconds
    """Its measured update."""
    paths: Annotated[Names, Field(min_length=1)]
    """Which rates are scaled, all by one factor."""


class ScenarioPolicy(Section):
    """The engine's choices in a run."""

    parameters: Literal["device", "host", "storage"] = "host"
    """Where parameters live between uses."""
    codec: Literal["split", "fp32"] = "split"
    """How the state is encoded."""
    order: OrderName = "alternating"
    """Which record is updated next; by default `"resident"` with an overlap."""
    overlap: Overlap = "none"
    """What updates run under."""
    striping: StripingName = "adaptive"
    """How blocks are spread over paths."""
    prefetch: FewOrNone = 2
    """Units fetched ahead of use."""

    @model_validator(mode="before")
    @classmethod
    def _imply_order(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("overlap", "none") != "none":
            return {"order": "resident", **values}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raises ValueError for what a run of the engine refuses."""
        if self.overlap != "none" and self.order != "resident":
            raise ValueError(
                f"expected `order` `resident` with `overlap` `{self.overlap}`, as the order is "
                f"then the pass's own, found `{self.order}`"
            )
        if self.overlap in ("backward", "both") and self.parameters != "storage":
            raise ValueError(
                f"expected `parameters` `storage` with `overlap` `{self.overlap}`, as new values "
                f"wait there for the step, found `{self.parameters}`"
            )
        return self


class ScenarioRun(Section):
    """One model under one system on some nodes."""

    name: str
    """For the table; the fit refers to it."""
    system: System = "engine"
    """`"engine"`, or a baseline: what moves there is described in the documentation."""
    parameters: Number
    """Trainable bf16 parameters of each node's share of the model."""
    layers: Annotated[int, Field(gt=0, le=100_000)] = 32
    """Decoder blocks, all alike."""
    nodes: Few = 1
    """How many share what is shared."""
    gpus: FewOrNone | None = None
    """Of each node; None: the machine's."""
    paths: Names = ()
    """Which of the machine's are used; empty: all."""
    tokens: Tokens = 0
    """Of a node in each micro-step."""
    micro_steps: Few = 1
    """Forward and backward passes in each step."""
    host_budget: Size | None = None
    """What the engine may use of a node's memory; the cache is what is left."""
    cache_fraction: Share | None = None
    """Instead of a budget: the fraction of the state that stays in memory."""
    cache_memory: Size | None = None
    """Instead of a budget: bytes of state that stay in memory."""
    subgroup_parameters: Number | None = None
    """Of one record; None: 100 million for a baseline, the engine's own for the engine."""
    policy: ScenarioPolicy = ScenarioPolicy()
    """Of the engine."""
    published_update_s: Seconds | None = None
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
        if len(set(self.paths)) != len(self.paths):
            raise ValueError(f"expected each of `paths` once, found {list(self.paths)}")
        if self.like == self.name:
            raise ValueError("expected `like` to name another run, found this one")
        if self.system != "engine" and "policy" in self.model_fields_set:
            raise ValueError(f"expected no `policy` of system `{self.system}`, which has its own")
        self._check_cache([key for key in given if key != "host_budget"])
        self._check_records()
        return self

    def _check_cache(self, given: list[str]) -> None:
        keeps_none = self.system == "engine" and self.policy.order == "sequential"
        if given and (keeps_none or self.system == "deepspeed-like"):
            found = "order `sequential`" if keeps_none else f"system `{self.system}`"
            raise ValueError(f"expected no `{given[0]}` with {found}, which finds nothing in it")

    def _check_records(self) -> None:
        if self.layers * self.micro_steps > _MOST_USES:
            raise ValueError(
                f"expected `layers` times `micro_steps` to be at most {_MOST_USES}, found "
                f"{self.layers * self.micro_steps}"
            )
        subgroup = self.subgroup_parameters
        if subgroup is None and self.system != "engine":
            subgroup = SUBGROUP_PARAMETERS
        if subgroup is not None and self.parameters > subgroup * _MOST_RECORDS:
            raise ValueError(
                f"expected at most {_MOST_RECORDS} subgroups, found "
                f"{self.parameters / subgroup:.3g} with `subgroup_parameters` {subgroup:.3g}"
            )

    def _check_paths(self, machine_paths: tuple[str, ...]) -> None:
        """Raises ValueError where as many paths are not what the run can use."""
        count = len(self.paths or machine_paths)
        _, *ratio = self.policy.striping.split(":")
        if ratio and len(ratio) != count:
            raise ValueError(
                f"`runs.{self.name}.policy.striping`: expected one number for each of {count} "
                f"paths, found `{self.policy.striping}`"
            )
        if self.system == "mlp-like" and count > 2:
            raise ValueError(
                f"`runs.{self.name}.paths`: expected one or two for system `mlp-like`, which "
                f"splits 2 : 1, found {count}"
            )


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
        path_names = tuple(path.name for path in self.machine.paths)
        known = set(path_names)
        if len(known) != len(path_names):
            raise ValueError("expected each of `machine.paths` to have a name of its own")
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
        self._check_idle()
        for run in self.runs:
            run._check_paths(path_names)
            if self.fit and run.name == self.fit.run:
                self._check_fit(self.fit, run)
        return self

    def _check_idle(self) -> None:
        """Raises ValueError for what would do nothing."""
        machine = self.machine
        if not machine.gpus and not any(run.gpus for run in self.runs):
            for key in ("device_memory", "link_bytes_per_s"):
                if getattr(machine, key) is not None:
                    raise ValueError(
                        f"`machine.{key}`: expected a GPU with it, found none in `machine.gpus` "
                        "and in all `runs`"
                    )
        for run in self.runs:
            if run.tokens and machine.flops_per_s is None:
                raise ValueError(
                    f"`runs.{run.name}.tokens`: expected `machine.flops_per_s` with it, as passes "
                    "take no time without, found none"
                )

    def _check_fit(self, fit: ScenarioFit, run: ScenarioRun) -> None:
        """Raises ValueError where the run that is fitted uses none of the paths that are."""
        if run.paths and not set(run.paths) & set(fit.paths):
            raise ValueError(
                f"`fit.paths`: expected one that run `{run.name}` uses, {list(run.paths)}, found "
                f"{list(fit.paths)}"
            )


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
