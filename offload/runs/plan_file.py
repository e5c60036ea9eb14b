"""A plan as a run's configuration: what it chose, written out."""

import os
from pathlib import Path

from offload.config import Config, build_config
from offload.errors import ConfigError
from offload.plan.run_plan import RunPlan
from offload.runs.compared_policies import with_choices

MARK = "# A run as planned, by `offload plan --write`."
"""The first line of a file that may be written anew."""


def require_writable(file: Path) -> None:
    """Raises ConfigError unless there is no `file` or one that `write_plan` wrote."""
    if not file.parent.is_dir():
        raise ConfigError(
            f"cannot write the plan to `{file}`: expected a directory `{file.parent}`, found none; "
            "make it, or name another file with `--write`"
        )
    if not file.exists() and not file.is_symlink():
        return
    if not file.is_file() or not _first_line(file).startswith(MARK):
        raise ConfigError(
            f"cannot write the plan to `{file}`: expected no file or one that begins with "
            f"`{MARK}`, found another one; name another file with `--write`"
        )


def write_plan(file: Path, config: Config, plan: RunPlan) -> None:
    """Writes the run with every choice and size of its plan, defaults included.

    Raises:
        ConfigError: The file is not one that this wrote.
        PlanError: The run does not fit.
    """
    require_writable(file)
    plan.require_fit()
    text = f"{MARK}\n{planned_config(config, plan).to_toml()}"
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


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


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline()
