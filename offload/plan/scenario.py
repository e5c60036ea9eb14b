"""Simulates the runs of a scenario, with rates fitted on one of them where it says so."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.config.scenario import Scenario, ScenarioMachine, ScenarioPath, ScenarioRun
from offload.errors import PlanError
from offload.plan.machine import LinkRates, Machine, PathRates
from offload.plan.scenario_bound import least_step_s
from offload.plan.simulation import SimulatedMachine, SimulatedStep, simulate
from offload.plan.systems import SystemRun, system_run
from offload.plan.wear import wear
from offload.sizes import format_size

_FIT_ROUNDS = 20
"""Times are in proportion to rates but for ramps, kernels and paths that are not fitted: each
round leaves less."""
_FIT_ERROR = 1e-3
_FIT_CHANGE = 1e-9
"""A round that changes the update by less has rates that it does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What one run would do. Nothing of it was measured."""

    run: ScenarioRun
    machine: Machine
    system: SystemRun
    step: SimulatedStep | None
    """None where the host budget is too small."""
    device_bytes: int | None
    """Of parameters on each device, where they live there."""
    device_budget_bytes: int | None
    bound_s: float | None
    tokens_to_hide_io: int | None
    reasons: tuple[str, ...]
    like_step_s: float | None = None
    """Of the run that it is compared with."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def error(self) -> float | None:
        """The predicted update over the published one, less 1."""
        published = self.run.published_update_s
        if self.step is None or published is None:
            return None
        return self.step.update_s / published - 1

    @property
    def speed_up(self) -> float | None:
        """How many times faster a step is than that of the run it is compared with."""
        if self.step is None or self.like_step_s is None:
            return None
        return self.like_step_s / self.step.step_s

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of `offload plan`, and what belongs to a scenario."""
        host = self.system.host
        return {
            "name": self.run.name,
            "system": self.run.system,
            "nodes": self.run.nodes,
            "parameters": round(self.run.parameters),
            "is_simulated": True,
            "fits": self.fits,
            "reasons": list(self.reasons),
            "smallest": {
                "host_memory": host.smallest_bytes,
                "device_memory": self.device_bytes,
                "storage": _stored_bytes(self.system),
            },
            "tiers": {
                "device": {
                    "budget_bytes": self.device_budget_bytes,
                    "planned_bytes": self.device_bytes,
                },
                "host": {"budget_bytes": host.budget_bytes, "planned_bytes": host.planned_bytes},
                "storage": {"budget_bytes": None, "planned_bytes": _stored_bytes(self.system)},
            },
            "policy": self.system.policy,
            "cached_bytes": self.system.cached_bytes,
            "predicted": self._predicted(),
            "path_bytes": self._path_bytes(),
            "published_update_s": self.run.published_update_s,
            "relative_error": self.error,
            "like": self.run.like,
            "speed_up": self.speed_up,
            "machine": self.machine.to_json(),
        }

    def _path_bytes(self) -> dict[str, int] | None:
        if self.step is None:
            return None
        names = [path.path for path in self.machine.paths]
        return dict(zip(names, self.step.path_bytes, strict=True))

    def _predicted(self) -> dict[str, float | int | None]:
        step = self.step
        per_day = None
        if step is not None:
            worn = wear(bytes_per_step=step.write_bytes, step_s=step.step_s, endurance_bytes=None)
            per_day = worn.bytes_per_day
        return {
            "step_s": step.step_s if step else None,
            "forward_s": step.forward_s if step else None,
            "backward_s": step.backward_s if step else None,
            "update_s": step.update_s if step else None,
            "exposed_io_s": step.exposed_io_s if step else None,
            "bound_s": self.bound_s,
            "read_bytes_per_step": step.read_bytes if step else None,
            "write_bytes_per_step": step.write_bytes if step else None,
            "rss_peak_bytes": self.system.host.planned_bytes if step else None,
            "written_bytes_per_day": per_day,
            "tokens_to_hide_io": self.tokens_to_hide_io,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioReport:
    """All runs of a scenario."""

    scenario: Scenario
    scale: float | None
    """By which the fit changed the rates; None without one."""
    runs: tuple[SimulatedRun, ...]

    @property
    def fits(self) -> bool:
        return all(run.fits for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of the first run, and all runs."""
        runs = [run.to_json() for run in self.runs]
        fit = self.scenario.fit
        return {
            **runs[0],
            "title": self.scenario.title,
            "source": self.scenario.source,
            "fit": None if fit is None else {"run": fit.run, "scale": self.scale},
            "runs": runs,
        }


def simulate_scenario(scenario: Scenario) -> ScenarioReport:
    """Returns what every run of `scenario` would do."""
    scale = _fitted_scale(scenario)
    machine = _scaled(scenario, scale or 1.0)
    found = [_simulated(run, machine) for run in scenario.runs]
    step_s = {each.run.name: each.step.step_s if each.step else None for each in found}
    return ScenarioReport(
        scenario=scenario,
        scale=scale,
        runs=tuple(
            replace(each, like_step_s=step_s[each.run.like] if each.run.like else None)
            for each in found
        ),
    )


def _fitted_scale(scenario: Scenario) -> float | None:
    fit = scenario.fit
    if fit is None:
        return None
    run = next(run for run in scenario.runs if run.name == fit.run)
    scale, update_s = 1.0, 0.0
    for _ in range(_FIT_ROUNDS):
        step = _simulated(run, _scaled(scenario, scale)).step
        if step is None:
            raise PlanError(
                f"cannot fit rates on run `{run.name}`: it does not fit; raise its budget"
            )
        before_s, update_s = update_s, step.update_s
        if abs(update_s / fit.update_s - 1) < _FIT_ERROR:
            return scale * update_s / fit.update_s
        if not update_s or abs(before_s / update_s - 1) < _FIT_CHANGE:
            break  # it would be asked for rates without end
        scale *= update_s / fit.update_s
    why = "other paths or the kernels take so long"
    raise PlanError(
        f"cannot fit rates on run `{run.name}`: expected an update of {fit.update_s:.4g} s, found "
        f"{update_s:.4g} s whatever {', '.join(f'`{name}`' for name in fit.paths)} give, as "
        f"{why if update_s > fit.update_s else 'it moves next to nothing there'}; correct "
        "`fit.update_s`, or the run's cache, paths or other rates"
    )


def _scaled(scenario: Scenario, scale: float) -> ScenarioMachine:
    fitted = scenario.fit.paths if scenario.fit else ()
    return scenario.machine.model_copy(
        update={
            "paths": tuple(
                _scaled_path(path, scale) if path.name in fitted else path
                for path in scenario.machine.paths
            )
        }
    )


def _scaled_path(path: ScenarioPath, scale: float) -> ScenarioPath:
    keys = (
        "read_bytes_per_s",
        "write_bytes_per_s",
        "shared_read_bytes_per_s",
        "shared_write_bytes_per_s",
    )
    rates = {key: getattr(path, key) for key in keys}
    return path.model_copy(update={key: rate * scale for key, rate in rates.items() if rate})


def _simulated(run: ScenarioRun, machine: ScenarioMachine) -> SimulatedRun:
    if run.gpus is not None:
        machine = machine.model_copy(update={"gpus": run.gpus})
    if not machine.gpus and run.policy.parameters == "device":  # whose memory is the host's
        policy = run.policy.model_copy(update={"parameters": "host"})
        run = run.model_copy(update={"policy": policy})
    rates = node_rates(machine, run)
    system = system_run(run, machine)
    device_bytes = _device_bytes(machine, run)
    found = SimulatedRun(
        run=run,
        machine=rates,
        system=system,
        step=None,
        device_bytes=device_bytes,
        device_budget_bytes=machine.device_memory if machine.gpus else None,
        bound_s=None,
        tokens_to_hide_io=None,
        reasons=tuple(_reasons(machine, run, system, device_bytes)),
    )
    if not system.host.fits:
        return found
    simulated = SimulatedMachine(rates=rates, shares_cores=machine.gpus == 0)
    step = simulate(system.work, simulated, system.make_policy())
    return replace(
        found,
        step=step,
        bound_s=least_step_s(system, rates, step, shares_cores=machine.gpus == 0),
        tokens_to_hide_io=_tokens_to_hide_io(run, system, rates, step),
    )


def node_rates(machine: ScenarioMachine, run: ScenarioRun) -> Machine:
    """Returns what one of the run's nodes gets: of what is shared, an equal part.

    All nodes do the same at the same time, so that equal parts are what they get.
    """
    names = run.paths or tuple(path.name for path in machine.paths)
    return Machine(
        paths=tuple(
            _path_rates(next(p for p in machine.paths if p.name == name), run.nodes)
            for name in names
        ),
        copy_bytes_per_s=machine.copy_bytes_per_s,
        update_parameters_per_s=machine.update_parameters_per_s,
        link=_link_rates(machine),
    )


def _link_rates(machine: ScenarioMachine) -> LinkRates | None:
    """Returns those of all devices together."""
    if not machine.gpus or machine.link_bytes_per_s is None:
        return None
    rate = machine.link_bytes_per_s * machine.gpus
    return LinkRates(in_bytes_per_s=rate, out_bytes_per_s=rate)


def _path_rates(path: ScenarioPath, nodes: int) -> PathRates:
    read = _part(path.read_bytes_per_s, path.shared_read_bytes_per_s, nodes)
    write = _part(path.write_bytes_per_s, path.shared_write_bytes_per_s, nodes)
    half, full = 1 / (1 / read + 1 / write), min(read, write)
    return PathRates(
        path=path.name,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_bytes_per_s=half + path.duplex * (full - half),
    )


def _part(own: float, shared: float | None, nodes: int) -> float:
    return own if shared is None else min(own, shared / nodes)


def _device_bytes(machine: ScenarioMachine, run: ScenarioRun) -> int | None:
    """Returns the bytes of parameters on each device; None where they live elsewhere."""
    if run.policy.parameters != "device" or run.system != "engine" or not machine.gpus:
        return None
    return -(-2 * round(run.parameters) // machine.gpus)


def _reasons(
    machine: ScenarioMachine, run: ScenarioRun, system: SystemRun, device_bytes: int | None
) -> Sequence[str]:
    found = []
    host = system.host
    if not host.fits:
        found.append(
            f"run `{run.name}` does not fit `host_budget`: expected at least "
            f"{_described(host.smallest_bytes)}, found {_described(host.budget_bytes)}; raise it"
        )
    planned = host.planned_bytes
    if machine.host_memory is not None and planned > machine.host_memory:
        found.append(
            f"run `{run.name}` does not fit a node's memory: expected at least "
            f"{_described(planned)}, found {_described(machine.host_memory)}; lower its cache or "
            "raise `machine.host_memory`"
        )
    budget = machine.device_memory
    if device_bytes is not None and budget is not None and device_bytes > budget:
        found.append(
            f"run `{run.name}` does not fit the devices: expected at least "
            f"{_described(device_bytes)} on each for parameters, found {_described(budget)}; set "
            "`policy.parameters` to `host`"
        )
    return found


def _described(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_size(num_bytes)})"


def _stored_bytes(system: SystemRun) -> int:
    """Of what is on storage the versions that its system keeps; gradients have one."""
    records = system.work.records
    pieces = sum(piece.num_bytes for record in records for piece in record.pieces)
    states = sum(record.state_bytes for record in records)
    spilled = sum(record.spilled_bytes for record in records)
    return system.num_versions * (states + pieces) + spilled


def _tokens_to_hide_io(
    run: ScenarioRun, system: SystemRun, rates: Machine, step: SimulatedStep
) -> int | None:
    """Tokens of a node in a step whose passes take as long as all transfers of the step."""
    passes_s = run.micro_steps * sum(u.forward_s + u.backward_s for u in system.work.units)
    if not passes_s or not run.tokens:
        return None
    transfer_s = rates.transfer_s(read_bytes=step.read_bytes, write_bytes=step.write_bytes)
    return round(run.tokens * run.micro_steps * transfer_s / passes_s)
