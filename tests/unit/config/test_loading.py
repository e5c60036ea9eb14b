"""Files, overrides and presets become one configuration that can be written and read again."""

import math
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import Config, build_config, load_config, preset_names, resolve_policy
from offload.config.overrides import apply_overrides, parse_overrides
from offload.config.toml import format_toml
from offload.errors import ConfigError

BUDGET = {"tiers": {"host": {"memory": "400MiB"}}}
FULL = """
offload = true
policy = "laptop"
[model]
layers = 2
dtype = "float32"
[data]
source = "files"
files = ["text/*.txt", "/data/more.txt"]
[train]
steps = 7
max_grad_norm = 1.0
[optimizer]
lr = 6e-4
betas = [0.9, 0.95]
[tiers.host]
memory = "1.5GiB"
[tiers.storage]
paths = ["store"]
capacity = "2TB"
commit_every = 5
"""


def _write(folder, text):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_values_defaults_and_sizes_in_bytes(tmp_path):
    config = load_config(_write(tmp_path, FULL))

    assert config.model.layers == 2
    assert config.train.batch == 2
    assert config.tiers.host.memory == 3 * 2**29
    assert config.tiers.storage.capacity_of(0) == 2 * 10**12
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.policy.order == "resident"
    assert config.policy.overlap == "forward"


def test_relative_paths_start_at_the_current_directory(tmp_path, monkeypatch):
    file = _write(tmp_path, FULL)
    monkeypatch.chdir(tmp_path.parent)

    config = load_config(file)

    assert config.tiers.storage.paths == (str(tmp_path.parent / "store"),)
    assert config.data.files == (str(tmp_path.parent / "text/*.txt"), "/data/more.txt")


def test_the_resolved_config_written_as_toml_loads_as_the_same(tmp_path):
    config = load_config(_write(tmp_path, FULL))

    again = load_config(_write(tmp_path, config.to_toml()))

    assert again == config
    assert build_config(config.to_dict()) == config


def test_a_config_cannot_be_changed():
    config = build_config(BUDGET)

    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("a=4", 4),
        ("a=4.5", 4.5),
        ("a=true", True),
        ('a="4"', "4"),
        ("a=[1, 2]", [1, 2]),
        ("a={b = 1}", {"b": 1}),
        ("a=400MiB", "400MiB"),
        ("a=/mnt/a b", "/mnt/a b"),
        ("a=", ""),
        ("a=x=y", "x=y"),
        ("a=1\nb=2", "1\nb=2"),
    ],
)
def test_an_override_is_toml_and_otherwise_text(argument, value):
    assert parse_overrides([argument]) == {"a": value}


@pytest.mark.parametrize("argument", ["train.steps", "=4", "train.=4", ".=4"])
def test_an_override_without_key_or_value_is_refused(argument):
    with pytest.raises(ConfigError, match="expected `key=value`"):
        parse_overrides([argument])


def test_an_override_leaves_the_values_it_starts_from_unchanged():
    values = {"train": {"steps": 3}}

    changed = apply_overrides(values, {"train.steps": 4, "train.seed": 1})

    assert changed == {"train": {"steps": 4, "seed": 1}}
    assert values == {"train": {"steps": 3}}


def test_the_last_of_equal_overrides_holds(tmp_path):
    config = load_config(_write(tmp_path, FULL), ["train.steps=8", "train.steps=9"])

    assert config.train.steps == 9


@pytest.mark.parametrize("policy", ["laptop", None, {}])
def test_the_default_preset_fills_what_a_policy_leaves_open(policy):
    config = build_config(BUDGET | {"policy": policy})

    assert config.policy == build_config(BUDGET).policy


def test_an_override_changes_one_choice_of_a_named_preset():
    config = build_config(BUDGET | {"policy": "laptop"}, overrides={"policy.optimizer": "host"})

    assert config.policy.optimizer == "host"
    assert config.policy.parameters == "storage"


def test_a_policy_can_be_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('parameters = "host"\n', encoding="utf-8")

    config = build_config(BUDGET | {"policy": str(file)})

    assert config.policy.parameters == "host"


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_preset_resolves(name):
    build_config(BUDGET | {"policy": name})


@pytest.mark.parametrize("policy", ["latop", "missing.toml", "./missing"])
def test_an_unknown_policy_is_refused(policy):
    with pytest.raises(ConfigError, match=policy):
        resolve_policy(policy)


def test_a_near_preset_is_named():
    with pytest.raises(ConfigError, match="did you mean `laptop`"):
        resolve_policy("latop")


def test_a_factory_gets_the_keys_that_were_set():
    model = {"factory": "mine:build", "width": 8, "depth": 3, "mixed": {"a": [1]}}

    config = build_config(BUDGET | {"model": model})

    assert config.model.factory_arguments() == {"width": 8, "depth": 3, "mixed": {"a": [1]}}
    assert build_config(tomllib.loads(config.to_toml())) == config
    again = build_config(tomllib.loads(config.to_toml()))
    assert again.model.factory_arguments() == config.model.factory_arguments()


def test_without_offload_no_budget_is_needed():
    config = build_config({"offload": False})

    assert config.tiers.host.memory is None


def test_the_json_schema_names_every_section():
    schema = Config.json_schema()

    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["$defs"]["TrainConfig"]["properties"]["steps"]["description"]


_TOML_VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), _TOML_VALUES))
def test_toml_written_is_read_as_the_same_values(values):
    assert tomllib.loads(format_toml(values)) == values


def test_toml_keeps_infinity_and_refuses_other_types():
    assert tomllib.loads(format_toml({"a": math.inf})) == {"a": math.inf}

    with pytest.raises(TypeError, match="Path"):
        format_toml({"a": Path(os.sep)})


def test_a_path_has_its_own_capacity_and_rate_limit_or_that_of_all():
    tier = build_config(
        {},
        overrides={
            "tiers.host.memory": "1GiB",
            "tiers.storage.paths": ["/a", "/b"],
            "tiers.storage.capacity": ["1TB", "free"],
            "tiers.storage.rate_limit": "200MB",
            "tiers.storage.commit_every": "10min",
        },
    ).tiers.storage

    assert [tier.capacity_of(0), tier.capacity_of(1)] == [10**12, None]
    assert [tier.rate_limit_of(0), tier.rate_limit_of(1)] == [200_000_000, 200_000_000]
    assert tier.commit_every == "10min"


@pytest.mark.parametrize(
    ("policy", "overlap"),
    [
        (None, "forward"),
        ({"order": "alternating"}, "none"),
        ({"order": "sequential"}, "none"),
        ({"order": "resident"}, "forward"),
        ({"overlap": "none"}, "none"),
    ],
)
def test_an_order_that_is_asked_for_has_its_update_alone(policy, overlap):
    config = build_config({"policy": policy, "offload": False})

    assert config.policy.overlap == overlap


def test_auto_begins_with_the_preset_and_stays_what_it_is_in_a_file():
    values = {"tiers": {"host": {"memory": "1GiB"}}, "policy": {"order": "auto", "prefetch": 3}}

    config = build_config(values)

    assert config.policy.auto == {"order", "overlap"}  # which an order implies
    assert (config.policy.order, config.policy.overlap) == ("resident", "forward")
    assert build_config(config.to_dict()) == config
    assert 'order = "auto"' in config.to_toml()
    assert not config.settled().policy.auto
    assert 'order = "resident"' in config.settled().to_toml()


def test_a_policy_that_is_all_auto_leaves_what_is_set_alone():
    values = {"tiers": {"host": {"memory": "1GiB"}}, "policy": "auto"}

    config = build_config(values, overrides={"policy.parameters": "host"})

    assert config.policy.auto == {"optimizer", "order", "overlap", "prefetch"}
    assert config.policy.parameters == "host"
