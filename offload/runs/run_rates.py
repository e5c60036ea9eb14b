"""The rates by which a run's steps are judged, measured before and after them."""

import gc
import logging
from dataclasses import replace

from offload.config import Config
from offload.errors import StorageError
from offload.memory import trim_heap
from offload.optim.kernels import load_kernels
from offload.plan.machine import Machine
from offload.plan.run_plan import RunPlan
from offload.plan.storage import BLOCK_BYTES
from offload.runs.link_rates import link_rates
from offload.runs.probe import ProbeSize, probe_machine
from offload.runs.run_directory import RunDirectory
from offload.storage.engine import Engine
from offload.storage.measured import measured_settings

_LOG = logging.getLogger("offload.runs")


def probe_run(config: Config, plan: RunPlan, directory: RunDirectory) -> Machine:
    """Returns what the paths of an offloaded run, its kernels and memory deliver now."""
    assert plan.host is not None  # as is the next: this run is offloaded
    assert plan.storage is not None
    roots = [store.parent for store in directory.stores]
    settings = [each for root in roots for each in measured_settings(root)]
    with Engine(block_bytes=BLOCK_BYTES, paths=settings) as engine:
        machine = probe_machine(
            roots,
            engine=engine,
            kernels=load_kernels(),
            codec=config.optimizer.codec,
            rule=config.optimizer.rule,
            dtype=plan.layout.usual_dtype,
            size=ProbeSize.within(
                host_bytes=plan.host.budget_bytes, storage_bytes=plan.storage.planned_bytes
            ),
        )
    machine = replace(
        machine, link=link_rates(config.tiers.device, copy_bytes_per_s=machine.copy_bytes_per_s)
    )
    return machine.held_to(config.tiers.storage.rate_limits_of(len(roots)))


def probe_run_again(
    machine: Machine, config: Config, plan: RunPlan, directory: RunDirectory
) -> Machine:
    """Returns the better of each rate then and now: a path's rates drift while a run goes on."""
    gc.collect()  # the session's arena goes before the probe takes memory of its own
    trim_heap()
    try:
        return machine.best_of(probe_run(config, plan, directory))
    except StorageError as error:  # the run is done and committed: its result must not be lost
        _LOG.warning("the rates of the path could not be measured again: %s", error)
        return machine
