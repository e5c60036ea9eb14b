"""Policies that the plan chose for a run: the same results, kept where the run goes on."""

import re

import pytest

from offload.config import load_config
from offload.errors import PlanError

SLOW = "5MB"
"""Of the path each second: then what lies in memory is faster whatever the machine does."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("offload.runs.probe._MEASURE_S", 0.01)
    monkeypatch.setattr("offload.runs.pass_probe._ENOUGH_S", 0.01)


def adopted_by(run_dir):
    """The policy of the run as it was carried out."""
    policy = load_config(run_dir / "config.toml").policy
    assert not policy.auto
    return policy


def test_a_policy_that_the_plan_chose_gives_the_bits_of_the_fixed_one(
    tmp_path, small_config, train
):
    fixed = train(small_config(train__steps=3), run_dir=tmp_path / "fixed")
    notices = []

    chosen = train(
        small_config(
            train__steps=3, policy="auto", tiers__storage__rate_limit=SLOW, train__max_grad_norm=0.5
        ),
        run_dir=tmp_path / "chosen",
        on_notice=notices.append,
    )
    clipped = train(small_config(train__steps=3, train__max_grad_norm=0.5), run_dir=tmp_path / "c")

    assert adopted_by(tmp_path / "chosen").parameters == "host"
    assert (chosen.losses, chosen.state_digest) == (clipped.losses, clipped.state_digest)
    assert chosen.state_digest != fixed.state_digest
    assert "`policy.parameters` = `host`" in notices[-1]
    assert "instead of" in notices[-1]


def test_a_key_that_is_set_is_obeyed(tmp_path, small_config, train):
    train(
        small_config(
            train__steps=1,
            policy="auto",
            policy__parameters="storage",
            tiers__storage__rate_limit=SLOW,
        ),
        run_dir=tmp_path / "run",
    )

    assert adopted_by(tmp_path / "run").parameters == "storage"  # though `host` is faster


def test_a_run_that_goes_on_keeps_its_policy_while_that_fits(tmp_path, small_config, train):
    def config(steps, *, memory="48MiB", rate="none", policy="auto"):
        auto = {"policy": policy, "tiers__storage__rate_limit": rate}
        return small_config(model__layers=6, train__steps=steps, tiers__host__memory=memory, **auto)

    def go_on(config):
        notices.clear()
        return train(config, run_dir=tmp_path / "run", resume="auto", on_notice=notices.append)

    notices = []
    whole = train(config(4, policy="laptop"), run_dir=tmp_path / "whole")
    train(config(2, rate=SLOW), run_dir=tmp_path / "run")
    first = adopted_by(tmp_path / "run")

    go_on(config(3))
    kept, measured = adopted_by(tmp_path / "run"), list(notices)
    with pytest.raises(PlanError) as refused:
        go_on(config(4, memory="1MiB"))
    least = re.search(r"at least (\d+) bytes", str(refused.value))  # of any policy
    last = go_on(config(4, memory=int(least[1])))

    assert kept == first
    assert first.parameters == "host"
    assert not measured
    assert notices
    assert (last.losses, last.state_digest) == (whole.losses[3:], whole.state_digest)


def test_a_run_whose_times_are_not_known_says_that_nothing_was_chosen(
    tmp_path, small_config, train, monkeypatch, caplog
):
    monkeypatch.setattr("offload.runs.pass_finder.PassFinder.find", lambda self, **rates: None)

    train(small_config(train__steps=1, policy="auto"), run_dir=tmp_path / "run")

    assert adopted_by(tmp_path / "run").parameters == "storage"
    assert sum("`auto` in `policy`" in each for each in caplog.messages) == 1


def test_what_never_fits_says_so_before_anything_is_measured(tmp_path, small_config, train):
    config = small_config(policy="auto", tiers__host__memory="64KiB")

    with pytest.raises(PlanError, match="no other choice of `policy`"):
        train(config, run_dir=tmp_path / "run", on_notice=pytest.fail)

    assert not (tmp_path / "run").exists()
