"""Compares the policies that a run leaves open by the times that are predicted for them."""

from collections.abc import Callable, Collection
from dataclasses import asdict

from offload.config import Config
from offload.config.supported import unsupported_values
from offload.plan.alternatives import (
    Alternative,
    OpenChoices,
    fastest,
    other_distances,
    other_placements,
    other_updates,
)

StepTime = Callable[[Config], float | None]
"""Predicts the step of a run; None where it does not fit."""


def compare_policies(
    config: Config, open_keys: Collection[str], *, now_s: float, step_s: StepTime
) -> list[Alternative]:
    """Returns what was compared: the run's own policy first.

    Placements are compared first, then orders and overlaps under the best of these, and then
    prefetch distances: each choice matters less than the one before.

    Args:
        config: Of the run.
        open_keys: Of `policy`: those that may be another.
        now_s: Predicted for the run as it is.
        step_s: Predicts another one.
    """
    keys = OpenChoices.__dataclass_fields__
    own = OpenChoices(**{key: getattr(config.policy, key) for key in keys})
    found = [Alternative(choices=own, step_s=now_s)]
    for others in (other_placements, other_updates, other_distances):
        best = fastest(found[0], found[1:])
        for choices in others(best.choices, open_keys):
            changed = with_choices(config, choices)
            if not any(unsupported_values(changed)):
                found.append(Alternative(choices=choices, step_s=step_s(changed)))
    return found


def with_choices(config: Config, choices: OpenChoices) -> Config:
    """Returns the run under other choices."""
    policy = config.policy.with_values(**asdict(choices))
    return config.model_copy(update={"policy": policy})
