"""The phases of a run's steps, without what a run does besides: logging, saving, validation."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from offload.config import Config, build_config
from offload.runs.adoption import OnNotice
from offload.runs.result import TrainResult
from offload.runs.run_directory import find_stores
from offload.runs.train import run_training
from offload.runs.training_run import Progress

_LEFT_OUT = {
    "train.eval_every": 0,
    "tiers.storage.durability": "none",
    "tiers.storage.commit_every": 0,
    "checkpoint.save_every": 0,
}


def bench_step(
    config: Config, *, on_step: Progress | None = None, on_notice: OnNotice = lambda _: None
) -> TrainResult:
    """Runs `train.steps` steps in a directory that is removed again, and returns their figures.

    What a step moves and computes is that of the run. Nothing is committed, so the digest is that
    of the last step, and `run_dir` and `store`, which are gone by then, are None.

    Args:
        config: Of the run.
        on_step: Called with the metrics of each step.
        on_notice: Told what is measured for, and chosen in, a policy with `"auto"`.

    Raises:
        ConfigError, PlanError: As from a run.
    """
    values = config.to_dict()
    values.pop("checkpoint", None)
    measured = build_config(values, overrides=_LEFT_OUT, source="bench step")
    with tempfile.TemporaryDirectory(prefix="offload-bench-step-", dir=Path.cwd()) as folder:
        run_dir = Path(folder) / "run"
        try:
            result = run_training(
                measured,
                run_dir=run_dir,
                progress=on_step,
                on_notice=on_notice,
                is_kept=False,
            )
            return replace(result, run_dir=None, store=None)
        finally:
            for store in find_stores(run_dir):
                shutil.rmtree(store, ignore_errors=True)
