"""A plan as a run's configuration: what it chose, written out."""

from pathlib import Path

from offload.config import Config, build_config
from offload.plan.run_plan import RunPlan
from offload.runs.compared_policies import with_choices
from offload.runs.own_file import OwnFile

MARK = "# A run as planned, by `offload plan --write`."
"""In a file that may be written anew."""


def require_writable(file: Path) -> None:
    """Raises ConfigError unless `write_plan` can write `file`, which stays as it is."""
    _own(file).require_writable()


def write_plan(file: Path, config: Config, plan: RunPlan) -> None:
    """Writes the run with every choice and size of its plan, defaults included.

    Raises:
        ConfigError: The file is not one that this wrote, or cannot be written.
        PlanError: The run does not fit.
    """
    plan.require_fit()
    _own(file).write(f"{MARK}\n{planned_config(config, plan).to_toml()}")


def planned_config(config: Config, plan: RunPlan) -> Config:
    """Returns the config with the plan's budgets and choices where `config` left them open.

    `tiers.storage.capacity` stays open: free space is another by the time of the run.
    """
    sizes: dict[str, int] = {}
    if plan.device is not None:
        sizes["tiers.device.memory"] = plan.device.budget_bytes or plan.device.planned_bytes
    if plan.host is not None:
        sizes["tiers.host.memory"] = plan.host.budget_bytes
    config = config.settled()
    best = plan.suggested or (plan.adoption.chosen if plan.adoption else None)
    if best is not None:
        config = with_choices(config, best.choices)
    return build_config(config.to_dict(), overrides=sizes)


def _own(file: Path) -> OwnFile:
    return OwnFile(
        path=file, what="the plan to", mark=MARK, remedy="name another file with `--write`"
    )
