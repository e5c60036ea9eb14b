"""Bytes of a step are those of the formula however far ahead units are fetched."""

import itertools
import json

import pytest

from offload.runs.planning import plan_run
from offload.streaming.prefetch_distance import PrefetchDistance
from offload.streaming.residency import Residency


@pytest.fixture
def distances(monkeypatch):
    """Each update finds another distance, as where fetches come late or early by turns."""
    by_turns = itertools.cycle([1, 6, 3])
    now = [1]
    leave_all = Residency.evict_all

    def leave_all_and_change(self):
        now[0] = next(by_turns)
        leave_all(self)

    monkeypatch.setattr(Residency, "evict_all", leave_all_and_change)
    monkeypatch.setattr(PrefetchDistance, "units", property(lambda self: min(now[0], self._most)))


@pytest.mark.parametrize("memory", ["24MiB", "64MiB"])  # some units stay for backward, or all
@pytest.mark.parametrize("eval_every", [0, 1, 2])
def test_each_step_has_the_units_that_it_used_and_not_those_read_ahead_for_the_next(
    tmp_path, small_config, train, distances, eval_every, memory
):
    # Wide enough that padding to 4096 bytes stays under 1 %.
    config = small_config(
        model__layers=6, model__width=256, train__steps=8, train__eval_every=eval_every,
        tiers__host__memory=memory, policy__parameters="storage", policy__optimizer="storage",
        policy__order="sequential", policy__overlap="none",
    )  # fmt: skip

    found = train(config, run_dir=tmp_path / "run")

    steps = read_bytes_of_steps(tmp_path / "run")[1:]  # the first has no trace
    assert max(steps) == min(steps)
    assert steps[0] == pytest.approx(found.formula_read_bytes_per_step, rel=0.01)


@pytest.mark.parametrize("eval_every", [0, 1])
def test_so_have_steps_whose_updates_run_under_the_next_forward(
    tmp_path, small_config, train, distances, eval_every
):
    config = small_config(
        model__layers=6, model__width=256, train__steps=6, train__eval_every=eval_every,
        tiers__host__memory="24MiB", policy__parameters="storage", policy__optimizer="storage",
        policy__order="resident", policy__overlap="forward",
    )  # fmt: skip

    found = train(config, run_dir=tmp_path / "run")

    steps = read_bytes_of_steps(tmp_path / "run")[2:]  # the second has the updates of the first
    assert max(steps) == min(steps)
    assert steps[0] == pytest.approx(found.formula_read_bytes_per_step, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "memory"), [("forward", "28MiB"), ("both", "56MiB")])
def test_a_step_after_a_commit_or_a_validation_reads_what_the_plan_says_of_these(
    tmp_path, small_config, train, overlap, memory
):
    config = small_config(
        model__layers=6, model__width=256, train__steps=8, train__eval_every=3,
        train__max_grad_norm=0.0, tiers__storage__commit_every=2, checkpoint__save_every=4,
        tiers__host__memory=memory, policy__parameters="storage", policy__optimizer="storage",
        policy__order="resident", policy__overlap=overlap,
    )  # fmt: skip
    plan = plan_run(config)

    found = train(config, run_dir=tmp_path / "run")

    kinds = ["commit", "validation", "commit", "step", "validation", "step"]  # from the third on
    planned = [plan.traffic.read_bytes + plan.rhythm.more_read_bytes[kind] for kind in kinds]
    assert len(set(planned)) > 1
    assert read_bytes_of_steps(tmp_path / "run")[2:] == pytest.approx(planned, rel=0.002)
    assert found.formula_read_bytes_per_step == pytest.approx(sum(planned) / 6, abs=1)
    assert found.read_bytes_per_step == pytest.approx(sum(planned) / 6, rel=0.002)
    # In the long run: over the twelve steps after which all begins anew.
    assert plan.to_json()["predicted"]["read_bytes_per_step"] == pytest.approx(
        plan.traffic.read_bytes + plan.rhythm.mean_more_bytes(range(2, 14)), abs=1
    )


def read_bytes_of_steps(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["read_bytes"] for line in lines]
