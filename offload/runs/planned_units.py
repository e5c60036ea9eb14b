"""The units of a run's model and the memory that it takes, arranged as a session arranges them."""

from torch import nn

from offload.config import Config
from offload.layout import ModelLayout
from offload.policy import resolve_order
from offload.session.options import wrap_options
from offload.streaming.arrangement import Arrangement, arrange


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
