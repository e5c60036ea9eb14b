"""How the configuration of a session says that a model is wrapped, and where it computes."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.config import Config
from offload.devices import Device, make_device
from offload.plan.activations import plan_activations
from offload.plan.machine_profile import read_profile
from offload.plan.window import window_bytes_for
from offload.session.arguments import resolve
from offload.sizes import parse_duration
from offload.streaming.activations import ActivationOptions
from offload.streaming.unit_modules import UnitRules
from offload.streaming.wrap_options import WrapOptions

_log = logging.getLogger("offload.session")


def wrap_options(
    config: Config, *, training: bool, units: Mapping[str, Any] | None, roots: Sequence[Path] = ()
) -> WrapOptions:
    """Returns the options of a model without a name that has all of the budgets.

    Args:
        config: Of the session.
        training: False: no gradients and no optimizer state.
        units: Keys of `units` in a config, for this model.
        roots: Directories of the store.
    """
    if units is not None:
        config = resolve(config, {f"units.{key}": value for key, value in units.items()})
    return WrapOptions(
        budget_bytes=config.tiers.host.memory if config.offload else None,
        device_budget_bytes=config.tiers.device.memory,
        parameters=config.parameter_tier,
        optimizer=config.optimizer_tier,
        codec=config.optimizer.codec,
        rule=config.optimizer.rule,
        matrices=config.optimizer.whole_patterns,
        gradient_dtype=config.train.gradient_dtype,
        prefetch_distance=config.policy.prefetch,
        is_training=training,
        activations=_activation_options(config),
        units=UnitRules.of(config.units),
        overlap=config.policy.overlap if config.offload else "none",
        window_bytes=window_bytes_for(config.tiers.host.window, roots, read_profile()),
    )


def device_of(config: Config) -> Device:
    """Returns the device where models compute, not yet open.

    Raises:
        ConfigError: This machine has none of its kind.
    """
    tier = config.tiers.device
    return make_device(
        tier.kind,
        memory_bytes=tier.memory if config.offload else None,
        link_bytes_per_s=tier.link_rate,
        link_latency_s=parse_duration(tier.link_latency) if tier.link_latency else 0.0,
    )


def warn_of_tiers(config: Config) -> None:
    """Says so where a tier that was named is another's memory, or moving there frees nothing."""
    if config.offload and config.policy.parameters != config.parameter_tier:
        _log.warning(
            "`policy.parameters` = `device` is `host` on device `%s`: it computes in host memory",
            config.tiers.device.kind,
        )
    moves = config.activations.offload if config.offload else "none"
    if moves == "host" and config.tiers.device.kind == "cpu":
        _log.warning(
            "`activations.offload` = `host` frees no memory on device `cpu`: activations move "
            "within it; `storage` frees it"
        )


def warn_of_threads(device: Device, *, committed: int | None) -> None:
    """Says so where the CPU computes with another number of threads than before.

    Args:
        device: Where models compute.
        committed: Threads of torch when the commit that is resumed was made; None: not known.
    """
    now = torch.get_num_threads()
    if device.torch_device.type == "cpu" and committed not in (None, now):
        _log.warning(
            "the commit that is resumed was made with %d of torch's threads, and this process has "
            "%d: losses and weights may differ in bits from those of one run; for the same, call "
            "`torch.set_num_threads(%d)` before, or set `OMP_NUM_THREADS`",
            committed,
            now,
            committed,
        )


def _activation_options(config: Config) -> ActivationOptions:
    asked = config.activations
    moves = asked.offload if config.offload else "none"
    return ActivationOptions(
        checkpoint=asked.checkpoint,
        offload=moves,
        threshold_bytes=asked.threshold,
        plan=plan_activations(moves, memory_bytes=asked.memory, threshold_bytes=asked.threshold),
    )
