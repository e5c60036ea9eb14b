"""Measures in seconds how long the passes of a model take: on a shorter model of the same shape."""

import statistics
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import torch

from offload.config import Config
from offload.config.schema import DeviceTierConfig
from offload.layout import build_layout
from offload.plan.machine_profile import PassProfile
from offload.runs.activations import ActivationMeter
from offload.runs.data import Text
from offload.runs.gpt import logits_workspace_bytes
from offload.runs.loop import TrainingLoop
from offload.runs.model import build_meta_model, build_model, gpt_shape
from offload.runs.optimizer import make_optimizer
from offload.runs.phases import StepClock, StepTimes
from offload.session import Session
from offload.streaming.discovery import discover_units

_SHORT, _LONG = 1, 3
"""Layers of the two models whose difference is what one layer takes."""
_ROUNDS = 4
_ENOUGH_S = 0.8
"""Of one model: no further round begins after that."""
_BYTES_PER_PARAMETER = 16
"""Of a model whose state is all in memory, gradients on their way included."""
_TEXT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    forward_s: float
    backward_s: float
    other_s: float
    activation_bytes: float


def pass_shape(config: Config) -> str | None:
    """Returns all that the passes' time depends on as text; None for a model of the user's."""
    model, train = config.model, config.train
    if model.factory is not None:
        return None
    return (
        f"gpt width={model.width} heads={model.heads} context={model.context} "
        f"vocabulary={model.vocabulary} {model.dtype} batch={train.batch} "
        f"gradients={train.gradient_dtype}"
        + (" checkpoint=unit" if config.activations.checkpoint == "unit" else "")
        + (f" device={kind}" if (kind := config.tiers.device.kind) != "cpu" else "")
    )


def probe_passes(config: Config, *, most_bytes: int) -> PassProfile | None:
    """Returns how long a micro-step takes, by layers; None where that can't be known in seconds.

    The generator's state is left as it was.

    Args:
        config: Of the run.
        most_bytes: The most memory that the probe's own model may take.
    """
    shape = pass_shape(config)
    if shape is None or _model_bytes(config, _LONG) > most_bytes:
        return None
    with torch.random.fork_rng(devices=[]):
        short, long = (_measure(config, num_layers) for num_layers in (_SHORT, _LONG))

    def per_layer(name: str) -> float:
        difference: float = getattr(long, name) - getattr(short, name)
        return max(difference, 0.0) / (_LONG - _SHORT)

    def fixed(name: str) -> float:
        value: float = getattr(short, name) - per_layer(name) * _SHORT
        return max(value, 0.0)

    return PassProfile(
        shape=shape,
        threads=torch.get_num_threads(),
        forward_s=fixed("forward_s"),
        forward_layer_s=per_layer("forward_s"),
        backward_s=fixed("backward_s"),
        backward_layer_s=per_layer("backward_s"),
        other_s=fixed("other_s"),
        other_layer_s=per_layer("other_s"),
        activation_bytes=fixed("activation_bytes"),
        activation_layer_bytes=per_layer("activation_bytes"),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _model_bytes(config: Config, num_layers: int) -> int:
    model = build_meta_model(config.model.model_copy(update={"layers": num_layers}))
    facts = [unit.facts for unit in discover_units(model).units]
    return _BYTES_PER_PARAMETER * build_layout(facts, codec="split").num_parameters


def _measure(config: Config, num_layers: int) -> _Measured:
    """Runs steps of a model of so many layers, all in memory, as a run does."""
    config = config.model_copy(
        update={
            "offload": False,
            "model": config.model.model_copy(update={"layers": num_layers}),
            "train": config.train.model_copy(update={"micro_steps": 1}),
            "tiers": config.tiers.model_copy(update={"device": _without_link(config.tiers.device)}),
        }
    )
    values = np.random.default_rng(0).integers(0, 256, _TEXT_BYTES, dtype=np.uint8)
    length = max(_TEXT_BYTES, 2 * config.model.context)
    text = np.resize(values, length)
    meter = ActivationMeter()
    with Session(config) as session:
        model = session.wrap(build_model(config.model))
        model.train()
        loop = TrainingLoop(
            config=config,
            model=model,
            optimizer=make_optimizer(session, model, config.optimizer),
            text=Text(train=text, validation=text),
            device=session.device,
        )
        with meter.counting(without=model.parameters()):
            _step(loop, 1)
        times: list[StepTimes] = []
        while len(times) < _ROUNDS and sum(each.step_s for each in times) < _ENOUGH_S:
            times.append(_step(loop, 2 + len(times)))
    workspace = logits_workspace_bytes(
        gpt_shape(config.model), batch=config.train.batch, length=config.model.context
    )
    return _Measured(
        forward_s=statistics.median(each.forward_s for each in times),
        backward_s=statistics.median(each.backward_s for each in times),
        other_s=statistics.median(each.other_s for each in times),
        activation_bytes=meter.peak_bytes + workspace,
    )


def _without_link(tier: DeviceTierConfig) -> DeviceTierConfig:
    """Returns the device behind a link that is as fast as can be: plans count it by themselves."""
    return tier.model_copy(update={"link_rate": None, "link_latency": None})


def _step(loop: TrainingLoop, number: int) -> StepTimes:
    clock = StepClock(read_io_wait_s=lambda: 0.0)
    loop.run_step(number, clock)
    return clock.stop()
