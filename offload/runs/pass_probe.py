"""Measures in seconds what the passes of a model take: on shorter models of the same shape.

[Note: the memory of passes] What passes hold beside saved tensors can't be derived: a library's
workspaces and generated code, and holes of the heap, of which a second micro-step leaves more, as
the gradients' objects lie between what the first has freed. So it is what the kernel counts of
two short models beyond what these are known to hold.
"""

import gc
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import torch

from offload.config import Config
from offload.config.schema import DeviceTierConfig
from offload.devices.opening import is_process_memory
from offload.layout import build_layout
from offload.memory import trim_heap
from offload.plan.machine_profile import PassProfile
from offload.runs.activations import ActivationMeter
from offload.runs.data import Text
from offload.runs.gpt import logits_workspace_bytes
from offload.runs.loop import TrainingLoop
from offload.runs.model import build_meta_model, build_model, gpt_shape
from offload.runs.optimizer import make_optimizer
from offload.runs.phases import StepClock, StepTimes
from offload.runs.planned_units import arrange_run
from offload.runs.rss import RssMeter, current_rss_bytes
from offload.session import Session, SessionStats
from offload.streaming.discovery import discover_units

_SHORT, _LONG = 1, 3
"""Layers of the two models whose difference is what one layer takes."""
_ROUNDS = 4
_ENOUGH_S = 0.8
"""Of one model: no further round begins after that."""
_BYTES_PER_PARAMETER = 16
"""Of a model whose state is all in memory, gradients on their way included."""
_TEXT_BYTES = 1 << 16
_MOST_MICRO_STEPS = 2
"""Those after the second take what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    forward_s: float
    backward_s: float
    other_s: float
    activation_bytes: float
    workspace_bytes: float
    update_s: float
    num_parameters: int
    num_records: int

    def record_s(self, update_parameters_per_s: float) -> float:
        """Returns what each record of an update takes beside the fused pass."""
        beside_s = self.update_s - self.num_parameters / update_parameters_per_s
        return max(beside_s, 0.0) / max(self.num_records, 1)


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
        + (" accumulating" if train.micro_steps > 1 else "")
    )


def probe_bytes(config: Config) -> int:
    """Returns the memory that the larger of the probe's models takes."""
    model = build_meta_model(config.model.model_copy(update={"layers": _LONG}))
    facts = [unit.facts for unit in discover_units(model).units]
    return _BYTES_PER_PARAMETER * build_layout(facts, codec="split").num_parameters


def probe_passes(config: Config, *, shape: str, update_parameters_per_s: float) -> PassProfile:
    """Returns how long a micro-step takes, by layers.

    The generator's state is left as it was.

    Args:
        config: Of the run.
        shape: Of its passes, as `pass_shape` gives it.
        update_parameters_per_s: Of the fused pass in memory.
    """
    gc.collect()
    trim_heap()
    # Before both: what libraries set up for the first is part of what a run's passes take.
    rss, held_bytes = RssMeter(), current_rss_bytes()
    with torch.random.fork_rng(devices=[]):
        short, long = (
            _measure(config, num_layers, rss, held_bytes) for num_layers in (_SHORT, _LONG)
        )

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
        **(_workspace(config, short, long) if rss.is_exact else {}),
        record_s=long.record_s(update_parameters_per_s),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _workspace(config: Config, short: _Measured, long: _Measured) -> dict[str, float]:
    """Returns the fixed part and that of a layer.

    Behind a link most of it is copies on their way, which do not get more with the layers.
    """
    per_layer = max(long.workspace_bytes - short.workspace_bytes, 0) / (_LONG - _SHORT)
    if config.tiers.device.kind != "cpu":
        fixed, per_layer = max(short.workspace_bytes, long.workspace_bytes), 0.0
    else:
        fixed = max(short.workspace_bytes - per_layer * _SHORT, 0.0)
    return {"workspace_bytes": fixed, "workspace_layer_bytes": per_layer}


def _measure(config: Config, num_layers: int, rss: RssMeter, held_bytes: int) -> _Measured:
    """Returns what steps of a model of so many layers take, all in memory, as a run does.

    Args:
        config: Of the run.
        num_layers: Of the model.
        rss: Counts what the process holds.
        held_bytes: By the process before it ran any.
    """
    config = _config_of(config, num_layers)
    micro_steps, meter = config.train.micro_steps, ActivationMeter()
    times, arena_bytes = _train(config, meter, rss)
    peak_bytes = rss.peak_bytes
    gc.collect()
    trim_heap()
    layout = arrange_run(config, build_meta_model(config.model)).layout
    activation_bytes = meter.peak_bytes + logits_workspace_bytes(
        gpt_shape(config.model), batch=config.train.batch, length=config.model.context
    )
    return _Measured(
        forward_s=statistics.median(each.forward_s for each in times) / micro_steps,
        backward_s=statistics.median(each.backward_s for each in times) / micro_steps,
        other_s=statistics.median(each.other_s for each in times),
        activation_bytes=activation_bytes,
        workspace_bytes=max(peak_bytes - held_bytes - arena_bytes - activation_bytes, 0),
        update_s=statistics.median(each.update_s for each in times),
        num_parameters=layout.trainable_elements,
        num_records=len(layout.records),
    )


def _train(config: Config, meter: ActivationMeter, rss: RssMeter) -> tuple[list[StepTimes], int]:
    """Returns the times of steps after the first, and what arenas hold of the memory."""
    values = np.random.default_rng(0).integers(0, 256, _TEXT_BYTES, dtype=np.uint8)
    length = max(_TEXT_BYTES, 2 * config.model.context)
    text = np.resize(values, length)
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
        rss.start()
        with meter.counting(without=model.parameters()):
            _step(loop, 1)
        times: list[StepTimes] = []
        while len(times) < _ROUNDS and sum(each.step_s for each in times) < _ENOUGH_S:
            times.append(_step(loop, 2 + len(times)))
        rss.sample()
        return times, _arena_bytes(config, session.stats())


def _config_of(config: Config, num_layers: int) -> Config:
    """Returns the run with so many layers, all in memory."""
    micro_steps = min(config.train.micro_steps, _MOST_MICRO_STEPS)
    return config.model_copy(
        update={
            "offload": False,
            "model": config.model.model_copy(update={"layers": num_layers}),
            "train": config.train.model_copy(update={"micro_steps": micro_steps}),
            "tiers": config.tiers.model_copy(update={"device": _without_link(config.tiers.device)}),
        }
    )


def _without_link(tier: DeviceTierConfig) -> DeviceTierConfig:
    """Returns the device behind a link that is as fast as can be: plans count it by themselves."""
    return tier.model_copy(update={"link_rate": None, "link_latency": None})


def _arena_bytes(config: Config, stats: SessionStats) -> int:
    """Returns what arenas hold of this process's memory."""
    has_device = is_process_memory(config.tiers.device.kind)
    return stats.host_peak_bytes + (stats.device_peak_bytes or 0 if has_device else 0)


def _step(loop: TrainingLoop, number: int) -> StepTimes:
    clock = StepClock(read_io_wait_s=lambda: 0.0)
    loop.run_step(number, clock)
    return clock.stop()
