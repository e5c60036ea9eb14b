"""The units of a run's model and the memory that it takes, arranged as a session arranges them."""

from collections.abc import Iterator

from torch import nn

from offload.config import Config
from offload.layout import ModelLayout
from offload.plan.explanation import Saving
from offload.policy import resolve_order
from offload.session.options import wrap_options
from offload.streaming.arrangement import Arrangement, arrange

_SAVINGS = {
    "policy.parameters": ("storage", "passes then wait for fetches"),
    "policy.optimizer": ("storage", "updates then move the state"),
    "policy.overlap": ("none", "gradients may then go to storage where memory is too short"),
    "train.gradient_dtype": (
        "parameter",
        "gradients then accumulate in the parameters' own precision",
    ),
    "activations.offload": (
        "none",
        "activations then stay where they are; a smaller `activations.memory` helps too",
    ),
}
"""The value of each key with which a run takes least memory, and what that costs."""


def arrange_run(
    config: Config, model: nn.Module, *, stored: ModelLayout | None = None
) -> Arrangement:
    """Returns the units of the run's model, their layout, and how budgets are cut for them.

    Args:
        config: Of the run.
        model: Without values.
        stored: The layout of the store that is gone on with.
    """
    return arrange(
        model,
        wrap_options(config, training=True, units=None),
        prefix="",
        stored=stored,
        keeps_records=bool(resolve_order(config.policy.order).kept(1, 1, step=1)),
        is_unified=config.tiers.device.kind == "cpu",
    )


def possible_savings(
    config: Config, model: nn.Module, *, stored: ModelLayout | None, smallest_bytes: int
) -> Iterator[Saving]:
    """Yields changes with which a host budget below `smallest_bytes` would do.

    Args:
        config: Of the run.
        model: Without values.
        stored: The layout of the store that is gone on with.
        smallest_bytes: The smallest budget of the run as it is.
    """
    for key, (value, why) in _SAVINGS.items():
        section, _, name = key.partition(".")
        before = getattr(config, section)
        if getattr(before, name) == value:
            continue
        changed = config.model_copy(update={section: before.model_copy(update={name: value})})
        smaller_bytes = arrange_run(changed, model, stored=stored).host.smallest_bytes
        if smaller_bytes < smallest_bytes:
            yield Saving(change=f'{key} = "{value}"', smallest_host_bytes=smaller_bytes, why=why)
