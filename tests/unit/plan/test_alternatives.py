"""Which policies are compared where a run leaves them open, and when one is worth a change."""

from dataclasses import replace

import pytest

from offload.config import build_config, open_policy_keys
from offload.errors import ConfigError
from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.alternatives import Alternative, OpenChoices, fastest
from offload.plan.host_cut import plan_host
from offload.plan.machine import Machine, PathRates
from offload.plan.prediction import Choices, predict_step
from offload.plan.traffic import ModelBytes, step_traffic
from offload.plan.work import PassTimes
from offload.runs.compared_policies import compare_policies, with_choices

LAYOUT = build_layout(
    [
        UnitFacts(
            name=f"u{index}",
            parameters=(ParameterFacts(name=f"p{index}", shape=(2 << 20,), dtype="bfloat16"),),
        )
        for index in range(6)
    ],
    codec="split",
)
PATH = PathRates(path="0", read_bytes_per_s=4e8, write_bytes_per_s=4e8, mixed_bytes_per_s=4e8)
MACHINE = Machine(paths=(PATH,), copy_bytes_per_s=4e10, update_parameters_per_s=1e9)
ALL = {"parameters", "optimizer", "order", "overlap", "prefetch"}


def config(**overrides):
    return build_config({"tiers": {"host": {"memory": "1GiB"}}}, overrides=overrides)


def compared(config, open_keys, times=lambda policy: 1.0):
    """Compares by times that are given; returns keys and times in the order of comparison."""
    found = compare_policies(config, open_keys, now_s=1.0, step_s=lambda c: times(c.policy))
    return [each.choices for each in found], fastest(found[0], found[1:])


def test_a_key_that_the_user_set_is_never_another():
    choices, _ = compared(config(), {"prefetch", "order"})

    assert {each.parameters for each in choices} == {"storage"}
    assert {(each.order, each.overlap) for each in choices} == {("resident", "forward")}
    assert [each.prefetch for each in choices] == [2, 1, 4, 8]


def test_only_combinations_that_a_run_accepts_are_compared():
    choices, _ = compared(config(**{"train.max_grad_norm": 1.0}), ALL)

    for each in choices:
        with_choices(config(), each)
    assert {each.overlap for each in choices} == {"forward", "none"}
    assert ("alternating", "none") in {(each.order, each.overlap) for each in choices}
    assert ("alternating", "forward") not in {(each.order, each.overlap) for each in choices}


def test_a_near_tie_keeps_what_the_run_has_and_a_clear_gain_does_not():
    def alternating(gain):
        return lambda policy: 1.0 - gain * (policy.order == "alternating")

    _, near = compared(config(), ALL, alternating(0.04))
    _, clear = compared(config(), ALL, alternating(0.2))

    assert near.choices.order == "resident"
    assert (clear.choices.order, clear.choices.overlap) == ("alternating", "none")


def test_later_choices_are_compared_under_the_best_of_the_earlier():
    def times(policy):
        return 0.5 if policy.parameters == "host" else 1.0

    choices, best = compared(config(), ALL, times)

    assert best.choices.parameters == "host"
    assert {each.parameters for each in choices if each.order != "resident"} == {"host"}


def test_what_does_not_fit_is_not_chosen_however_fast_it_is_elsewhere():
    _, best = compared(config(), ALL, lambda policy: None)

    assert best == Alternative(
        choices=OpenChoices(
            parameters="storage", optimizer="storage", order="resident", overlap="forward",
            prefetch=2,
        ),
        step_s=1.0,
    )  # fmt: skip


def test_open_keys_are_those_that_neither_file_nor_override_sets(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[policy]\norder = "resident"\n')
    named = tmp_path / "named.toml"
    named.write_text('policy = "laptop"\n')

    assert open_policy_keys(file, ["policy.prefetch=1"]) == {
        "parameters", "optimizer", "overlap", "striping",
    }  # fmt: skip
    assert open_policy_keys(named) == frozenset()
    assert open_policy_keys(file, ["policy=laptop"]) == frozenset()
    with pytest.raises(ConfigError):
        open_policy_keys(tmp_path / "missing.toml")


def test_passes_on_a_device_leave_the_cores_to_the_update_under_them():
    def step_s(device):
        choices = Choices(
            parameters="host", optimizer="host", order="resident", overlap="forward",
            striping="single", prefetch=1,
        )  # fmt: skip
        host = plan_host(LAYOUT, budget_bytes=1 << 30, parameters="host", optimizer="host")
        traffic = step_traffic(
            ModelBytes.of(LAYOUT), parameters="host", optimizer="host", micro_steps=1
        )
        times = PassTimes(forward_s=0.1, backward_s=0.1)
        found = predict_step(
            LAYOUT, host, traffic, choices,
            machine=replace(MACHINE, update_parameters_per_s=5e7),
            passes=[times] * len(LAYOUT.units),
            shares_cores=config(**{"tiers.device.kind": device}).shares_cores,
        )  # fmt: skip
        return found.step.step_s

    assert step_s("cpu") > 1.15 * step_s("cuda")


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_a_plan_counts_an_update_under_backward_as_partly_hidden(overlap):
    def exposed_s(overlap):
        choices = Choices(
            parameters="storage", optimizer="storage", order="resident", overlap=overlap,
            striping="single", prefetch=1,
        )  # fmt: skip
        host = plan_host(LAYOUT, budget_bytes=300 << 20, parameters="storage", optimizer="storage")
        traffic = step_traffic(
            ModelBytes.of(LAYOUT), parameters="storage", optimizer="storage", micro_steps=1
        )
        passes = [PassTimes(forward_s=0.1, backward_s=0.3)] * len(LAYOUT.units)
        found = predict_step(LAYOUT, host, traffic, choices, machine=MACHINE, passes=passes)
        return found.step.step_s - 0.4 * len(LAYOUT.units)

    assert exposed_s(overlap) < 0.85 * exposed_s("none")
