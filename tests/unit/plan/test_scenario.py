"""Scenarios: the published figures, what does not fit, what is refused."""

import json
from pathlib import Path

import pytest

from offload.cli.app import run as run_cli
from offload.config.scenario import Scenario, load_scenario
from offload.errors import ConfigError, PlanError
from offload.plan.scenario import simulate_scenario

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"


DRIVE = {"name": "drive", "read_bytes_per_s": 2e9, "write_bytes_per_s": 1e9}


def scenario(*runs, machine=None, policy=None, **keys):
    node = {"gpus": 1, "paths": [DRIVE]} | (machine or {})
    each = {"parameters": 1e8, "layers": 4} | ({"policy": policy} if policy else {})
    runs = [each | {"name": f"run {i}"} | run for i, run in enumerate(runs)]
    return Scenario.model_validate({"machine": node, "runs": runs, **keys})


def test_rates_fitted_on_one_run_predict_another_system():
    whole = load_scenario(SCENARIOS / "h100_node.toml")
    names = ("DeepSpeed 44.28 B", "MLP-Offload 44.28 B")

    report = simulate_scenario(
        whole.model_copy(update={"runs": tuple(r for r in whole.runs if r.name in names)})
    )

    fitted, other = (run.error for run in report.runs)
    assert abs(fitted) < 1e-3
    assert abs(other) < 0.10


@pytest.mark.slow
def test_rates_fitted_on_one_published_run_predict_the_others_within_a_tenth():
    report = simulate_scenario(load_scenario(SCENARIOS / "h100_node.toml"))

    errors = [run.error for run in report.runs if run.run.published_update_s]
    assert len(errors) == 7
    assert max(map(abs, errors)) < 0.10
    engine = [run for run in report.runs if run.run.system == "engine"]
    assert len(engine) == 3
    assert all(run.speed_up > 1.15 for run in engine)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_scenario_runs_and_fits(file):
    report = simulate_scenario(load_scenario(file))

    assert report.fits
    for run in report.runs:
        assert run.bound_s <= run.step.step_s * (1 + 1e-6)
        assert run.bound_s > 0.4 * run.step.step_s or run.run.system == "mlp-like"


def test_nodes_get_equal_parts_of_what_they_share():
    shared = {
        "name": "pfs",
        "read_bytes_per_s": 2e9,
        "write_bytes_per_s": 2e9,
        "duplex": 1,
        "shared_read_bytes_per_s": 8e9,
        "shared_write_bytes_per_s": 4e9,
    }
    report = simulate_scenario(
        scenario(
            {"nodes": 1},
            {"nodes": 16, "like": "run 0"},
            machine={"paths": [shared]},
        )
    )

    one, many = report.runs
    assert one.machine.paths[0].mixed_bytes_per_s == 2e9
    assert many.machine.paths[0].read_bytes_per_s == 5e8
    assert many.machine.paths[0].write_bytes_per_s == 2.5e8
    assert many.speed_up == pytest.approx(1 / 8, rel=0.05)


def test_baselines_move_what_their_papers_say():
    report = simulate_scenario(
        scenario(
            {"system": "deepspeed-like", "subgroup_parameters": 1e7},
            {"system": "mlp-like", "subgroup_parameters": 1e6, "cache_fraction": 0.2},
            machine={
                "paths": [
                    {"name": n, "read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9} for n in "ab"
                ]
            },
        )
    )

    deepspeed, mlp = (run.step for run in report.runs)
    assert deepspeed.read_bytes == deepspeed.write_bytes == 16 * 100_000_000
    assert deepspeed.path_bytes[1] == 0
    assert mlp.read_bytes == pytest.approx(12 * 0.8 * 1e8, rel=0.02)
    assert mlp.write_bytes == mlp.read_bytes
    assert mlp.path_bytes[0] == pytest.approx(2 * mlp.path_bytes[1], rel=0.1)


def test_a_budget_that_is_too_small_is_a_reason_and_not_an_error(capsys, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        "[[runs]]\nname = 'small'\nparameters = 1e8\nlayers = 4\nhost_budget = '100MB'\n"
        "[machine]\n"
        "[[machine.paths]]\nname = 'a'\nread_bytes_per_s = 1e9\nwrite_bytes_per_s = 1e9\n"
    )

    code = run_cli(["simulate", str(file), "--json"])

    values = json.loads(capsys.readouterr().out)
    assert code == 1
    assert not values["fits"]
    assert "`host_budget`: expected at least" in values["reasons"][0]
    assert values["predicted"]["step_s"] is None
    smallest = values["smallest"]["host_memory"]
    assert str(smallest) in values["reasons"][0]
    enough = scenario({"host_budget": smallest}, machine={"gpus": 0})
    short = scenario({"host_budget": smallest - 1}, machine={"gpus": 0})
    assert simulate_scenario(enough).fits
    assert not simulate_scenario(short).fits


def test_what_is_overwritten_in_place_is_stored_once():
    policy = {"parameters": "storage"}
    systems = ({"policy": policy}, {"system": "mlp-like"}, {"system": "deepspeed-like"})

    report = simulate_scenario(scenario(*systems))

    stored = [run.to_json()["smallest"]["storage"] for run in report.runs]
    # Two versions of 10 + 2; fp32 master and moments; these and fp32 gradients.
    assert stored == pytest.approx([24e8, 12e8, 16e8], rel=1e-3)


def test_parameters_on_devices_are_held_against_their_memory():
    report = simulate_scenario(
        scenario(
            {"gpus": 1},
            {"gpus": 2},
            {"gpus": 0},
            machine={"device_memory": 150_000_000},
            policy={"parameters": "device"},
        )
    )

    one, two, none = (run.to_json() for run in report.runs)
    assert one["smallest"]["device_memory"] == 200_000_000
    assert one["tiers"]["device"] == {"budget_bytes": 150_000_000, "planned_bytes": 200_000_000}
    assert "does not fit the devices" in one["reasons"][0]
    assert two["smallest"]["device_memory"] == 100_000_000
    assert two["fits"]
    # Without a device its memory is the host's, which holds the parameters then.
    assert none["smallest"]["device_memory"] is None
    host_bytes = [each["smallest"]["host_memory"] for each in (none, two)]
    assert host_bytes[0] - host_bytes[1] == pytest.approx(200_000_000, rel=1e-3)


def test_a_run_may_be_compared_with_one_that_is_compared_itself():
    runs = [{"like": "run 1"}, {"like": "run 2"}, {}]

    report = simulate_scenario(scenario(*runs))

    assert [run.speed_up for run in report.runs] == [1.0, 1.0, None]


def test_rates_that_the_fitted_run_does_not_depend_on_are_refused():
    kernels = {"update_parameters_per_s": 1e6}  # 100 s alone

    with pytest.raises(PlanError, match=r"an update of 50 s, found .* whatever `drive` give"):
        simulate_scenario(
            scenario({}, machine=kernels, fit={"run": "run 0", "update_s": 50, "paths": ["drive"]})
        )
    with pytest.raises(PlanError, match=r"of 10 s, found .* give, as it moves next to nothing"):
        simulate_scenario(
            scenario(
                {"cache_fraction": 1},
                fit={"run": "run 0", "update_s": 10, "paths": ["drive"]},
            )
        )


def test_an_overlap_brings_its_order():
    (run,) = scenario({"policy": {"overlap": "forward"}}).runs

    assert run.policy.order == "resident"


def test_the_command_prints_the_keys_of_a_plan_and_every_run(capsys, tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(
        "[machine]\nflops_per_s = 1e12\n"
        "[[machine.paths]]\nname = 'a'\nread_bytes_per_s = 1e9\nwrite_bytes_per_s = 1e9\n"
        "[[runs]]\nname = 'one'\nparameters = 1e8\nlayers = 4\ntokens = 512\n"
        "policy = { overlap = 'forward', order = 'resident', parameters = 'storage' }\n"
        "[[runs]]\nname = 'two'\nparameters = 1e8\nlayers = 4\nlike = 'one'\n"
    )

    code = run_cli(["simulate", str(file), "--json"])

    values = json.loads(capsys.readouterr().out)
    assert code == 0
    keys = {"fits", "reasons", "smallest", "tiers", "policy", "predicted", "machine", "runs"}
    assert keys <= set(values)
    assert [run["name"] for run in values["runs"]] == ["one", "two"]
    predicted = values["predicted"]
    assert None not in predicted.values()
    # All transfers of a step, at the share of passes in it that these tokens give.
    assert predicted["tokens_to_hide_io"] > 512
    assert run_cli(["simulate", str(file)]) == 0
    assert "against `one`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fit": {"run": "none", "update_s": 1.0, "paths": ["drive"]}}, "a run named `none`"),
        ({"fit": {"run": "run 0", "update_s": 1.0, "paths": ["tape"]}}, "names `tape`"),
        ({"fit": {"run": "run 0", "update_s": 1.0, "paths": []}}, "at least 1 item"),
        ({"machine": {"paths": [DRIVE, DRIVE]}}, "`machine.paths` to have a name of its own"),
    ],
)
def test_names_that_are_not_there_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        scenario({}, **change)


TWO = {"paths": [DRIVE, DRIVE | {"name": "other"}]}
THREE = {"paths": [*TWO["paths"], DRIVE | {"name": "third"}]}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"policy": {"overlap": "forward", "order": "alternating"}}, "expected `order` `resident`"),
        ({"policy": {"overlap": "both"}}, "expected `parameters` `storage`"),
        ({"policy": {"striping": "modulo:1:2:3"}}, "one number for each of 2 paths"),
        ({"policy": {"order": "sequential"}, "cache_fraction": 0.5}, "no `cache_fraction` with"),
        ({"system": "deepspeed-like", "cache_memory": "1GB"}, "no `cache_memory` with system"),
        ({"system": "mlp-like", "policy": {"order": "resident"}}, "no `policy` of system"),
        ({"paths": ["drive", "drive"]}, "each of `paths` once"),
        ({"like": "run 0"}, "`like` to name another run"),
        ({"subgroup_parameters": 1.0}, "at most 100000 subgroups, found 1e"),
        ({"subgroup_parameters": 0.4}, "greater than or equal to 1"),
        ({"parameters": float("inf")}, "finite number"),
        ({"parameters": 0.5}, "greater than or equal to 1"),
        ({"layers": 1000, "micro_steps": 101}, "`layers` times `micro_steps` to be at most 100000"),
        ({"nodes": 10**400}, "less than or equal to 1000000"),
        ({"gpus": 10**400}, "less than or equal to 1000000"),
        ({"tokens": 10**400}, "less than or equal to 1000000000000000"),
        ({"policy": {"prefetch": 10**400}}, "less than or equal to 1000000"),
        ({"published_update_s": 1e-300}, "greater than or equal to"),
    ],
)
def test_what_a_run_cannot_be_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        scenario(run, machine=TWO)


RATES = ("link_bytes_per_s", "flops_per_s", "update_parameters_per_s", "copy_bytes_per_s")


@pytest.mark.parametrize("rate", [1e-300, 1e300])
@pytest.mark.parametrize(
    "machine",
    [lambda rate, key=key: {key: rate} for key in RATES]
    + [lambda rate: {"paths": [DRIVE | {"read_bytes_per_s": rate}]}],
)
def test_rates_at_which_times_would_have_no_end_are_refused(machine, rate):
    with pytest.raises(ValueError, match="(greater|less) than or equal to 1"):
        scenario({}, machine=machine(rate))


def test_the_slowest_rates_give_a_time():
    slow = dict.fromkeys(RATES, 1)
    paths = [{"name": "drive", "read_bytes_per_s": 1, "write_bytes_per_s": 1}]
    run = {"parameters": 1e16, "tokens": 10**15, "policy": {"parameters": "storage"}}

    (found,) = simulate_scenario(scenario(run, machine={**slow, "paths": paths})).runs

    assert found.step.step_s >= found.bound_s * (1 - 1e-9) > 1e17


@pytest.mark.parametrize(
    ("machine", "run", "message"),
    [
        ({"gpus": 0, "device_memory": 1 << 30}, {}, "`machine.device_memory`: expected a GPU"),
        ({"gpus": 0, "link_bytes_per_s": 1e9}, {}, "`machine.link_bytes_per_s`: expected a GPU"),
        ({}, {"tokens": 4}, r"`runs.run 0.tokens`: expected `machine.flops_per_s`"),
    ],
)
def test_what_would_do_nothing_is_refused(machine, run, message):
    with pytest.raises(ValueError, match=message):
        scenario(run, machine=machine)

    used = {"gpus": 0, "flops_per_s": 1e12} | {k: v for k, v in machine.items() if k != "gpus"}
    scenario(run | {"gpus": 1}, machine=used)


def test_what_some_paths_cannot_be_is_refused():
    with pytest.raises(ValueError, match="expected one or two for system `mlp-like`"):
        scenario({"system": "mlp-like"}, machine=THREE)
    with pytest.raises(ValueError, match=r"`fit.paths`: expected one that run `run 0` uses"):
        scenario(
            {"paths": ["drive"]},
            machine=TWO,
            fit={"run": "run 0", "update_s": 1.0, "paths": ["other"]},
        )


def test_a_baseline_of_two_paths_takes_one_too():
    run = {"system": "mlp-like", "cache_fraction": 0.5, "subgroup_parameters": 5e6}

    (found,) = simulate_scenario(scenario(run)).runs

    assert found.step.read_bytes == pytest.approx(6 * 100_000_000, rel=0.01)


def test_a_wrong_key_names_the_file_and_the_key(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text("[machine]\npaths = []\n[[runs]]\nname = 'a'\nparameters = 1e8\nspeed = 2\n")

    with pytest.raises(ConfigError) as caught:
        load_scenario(file)

    message = str(caught.value)
    assert f"scenario `{file}`, key `machine.paths`: expected a list of 1 or more" in message
    assert "key `runs[0].speed`: expected a known key, found `runs[0].speed`; remove it" in message
    file.write_text(file.read_text().replace("speed = 2", "cache_fraction = 2"))
    with pytest.raises(ConfigError, match=r"cache_fraction`: expected 1 or less, found `2`"):
        load_scenario(file)
    with pytest.raises(ConfigError, match="cannot read scenario"):
        load_scenario(tmp_path / "none.toml")


def test_an_unknown_key_names_the_nearest_of_scenarios(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text("[[runs]]\nname = 'a'\nparameters = 1e8\ngpuz = 2\n")

    with pytest.raises(ConfigError, match=r"`runs\[0\]\.gpuz`; did you mean `runs\.gpus`\?"):
        load_scenario(file)
    with pytest.raises(ConfigError, match="expected a value, found none; set `machine`"):
        load_scenario(file)


def test_the_configuration_of_a_run_is_named_as_what_it_is(capsys):
    file = SCENARIOS.parent / "quickstart.toml"

    assert run_cli(["simulate", str(file)]) == 2

    message = capsys.readouterr().err
    assert "expected `machine` and `runs`, found `model`" in message
    assert f"use `offload plan {file}`" in message
