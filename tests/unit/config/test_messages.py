"""A wrong configuration is refused with a message that says where, what and what to do."""

import re

import pytest

from offload.config import build_config, load_config
from offload.errors import ConfigError

BUDGET = {"tiers": {"host": {"memory": "400MiB"}}}


def _message(overrides):
    with pytest.raises(ConfigError) as caught:
        build_config(BUDGET, overrides=overrides, source="config `run.toml`")
    message = str(caught.value)
    assert "run.toml" in message
    return message


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.stepz", "train.steps"),
        ("steps", "train.steps"),
        ("trian", "train"),
        ("tiers.host.memroy", "tiers.host.memory"),
        ("model.widht", "model.width"),
        ("policy.parametrs", "policy.parameters"),
        ("optimizer.learning_rate_of_all", None),
        ("zzz", None),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(key, nearest):
    message = _message({key: 4})

    assert f"key `{key}`" in message
    assert (f"did you mean `{nearest}`?" if nearest else "remove it") in message


@pytest.mark.parametrize(
    ("key", "value", "expected", "found"),
    [
        ("tiers.host.memory", "4GiBB", "a size such as `400MiB`", "`4GiBB`"),
        ("tiers.host.memory", "-1", "a size", "`-1`"),
        ("tiers.host.memory", 1.5, "a size", "`1.5`"),
        ("tiers.host.memory", 0, "more than 0", "`0`"),
        ("tiers.host.memory", True, "a size", "`True`"),
        ("train.steps", "many", "a whole number", '`"many"`'),
        ("train.steps", 4.0, "a whole number", "`4.0`"),
        ("train.steps", True, "a whole number", "`True`"),
        ("train.steps", 0, "more than 0", "`0`"),
        ("train.seed", -1, "0 or more", "`-1`"),
        ("train.steps", 10**400, "9223372036854775807 or less", f"`{10**400}`"),
        ("policy.prefetch", 10**400, "9223372036854775807 or less", f"`{10**400}`"),
        ("tiers.host.memory", 10**400, "9223372036854775807 or less", f"`{10**400}`"),
        ("tiers.storage.rate_limit", 10**400, "9223372036854775807 or less", f"`{10**400}`"),
        ("tiers.storage.capacity", 10**400, "9223372036854775807 or less", f"`{10**400}`"),
        ("train.batch", 1 << 62, "16777216 or less", f"`{1 << 62}`"),
        ("train.micro_steps", 1 << 62, "100000 or less", f"`{1 << 62}`"),
        ("model.width", 1 << 62, "16777216 or less", f"`{1 << 62}`"),
        ("model.layers", 1 << 62, "100000 or less", f"`{1 << 62}`"),
        ("optimizer.lr", "fast", "a number", '`"fast"`'),
        ("optimizer.lr", float("nan"), "a finite number", "`nan`"),
        ("optimizer.betas", [0.9, 1.5], "less than 1", "`1.5`"),
        ("optimizer.codec", "zip", "`split` or `fp32`", '`"zip"`'),
        ("offload", "no", "`true` or `false`", '`"no"`'),
        ("model", 3, "a table", "`3`"),
        ("train.steps.more", 1, "a whole number", "a table"),
        ("model.factory", "no colon", "`module:callable`", '`"no colon"`'),
        ("policy", 3, "a preset's name", "`3`"),
        ("policy.striping", "fastest", "`adaptive`, `proportional`, `single`", '`"fastest"`'),
        # Values of several types: one error, at the key itself.
        ("checkpoint.save_every", "abc", "a time such as `90s`", "`abc`"),
        ("checkpoint.save_every", True, "a whole number or text in quotes", "`True`"),
        ("tiers.storage.commit_every", -3, "0 or more", "`-3`"),
        ("tiers.storage.rate_limit", ["free"], "a whole number or `none`", '`"free"`'),
    ],
)
def test_a_wrong_value_names_key_expectation_and_finding(key, value, expected, found):
    message = _message({key: value})

    assert re.search(rf"key `{re.escape(key.removesuffix('.more'))}(\[\d\])?`", message)
    assert "\n" not in message
    assert f"expected {expected}" in message
    assert f"found {found}" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tiers.device.memory", "1GiB"),
        ("tiers.device.link_rate", "1GB"),
        ("tiers.device.link_latency", "1s"),
    ],
)
def test_a_known_value_that_is_not_available_is_refused(key, value):
    message = _message({key: value})

    assert f"key `{key}`" in message
    assert f"change `{key}`" in message


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"model.heads": 5}, "`width` must be a multiple of `heads`"),
        ({"model.vocabulary": 100}, "`vocabulary` must be 256 or more"),
        ({"model.kind": "factory"}, "set `factory`"),
        ({"model.kind": "gpt", "model.factory": "a:b"}, "leave `kind` out"),
        ({"data.source": "files"}, "`files` must be set"),
        ({"data.files": ["a"]}, "`files` must be set"),
        (
            {"tiers.storage.durability": "none", "tiers.storage.commit_every": 3},
            "`commit_every` must be 0",
        ),
        (
            {"tiers.storage.paths": ["/a", "/b", "/c"], "tiers.storage.capacity": ["1TB", "free"]},
            "`capacity` must have one value for all paths or one for each of 3, found 2",
        ),
        (
            {"tiers.storage.paths": ["/a"], "tiers.storage.rate_limit": ["1MB", "none"]},
            "`rate_limit` must have one value",
        ),
        ({"tiers.storage.commit_every": "10 minutes"}, "a time such as `90s`, `10min`"),
        ({"policy.striping": "fastest"}, "policy.striping"),
        (
            {"policy.overlap": "backward", "train.max_grad_norm": 1.0},
            'expected 0 with `policy.overlap = "backward"`, as a global norm',
        ),
        (
            {"policy.overlap": "both", "policy.parameters": "host"},
            'expected `"storage"` with `policy.overlap = "both"`',
        ),
        (
            {"policy.overlap": "forward", "policy.order": "alternating"},
            '`"resident"` with `policy.overlap = "forward"`',
        ),
        (
            {"tiers.storage.durability": "none", "checkpoint.save_every": 3},
            'expected 0 with `tiers.storage.durability = "none"`',
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides, text):
    assert text in _message(overrides)


@pytest.mark.parametrize(
    ("key", "value", "without", "with_it"),
    [
        ("checkpoint.drain_rate_limit", "1MB", "`checkpoint.drain`", {"checkpoint.drain": "/a"}),
        ("activations.memory", "1MiB", "no activation moves", {"activations.offload": "storage"}),
        ("activations.threshold", 1, "no activation moves", {"activations.offload": "host"}),
        ("optimizer.momentum", 0.9, '"adamw"', {"optimizer.name": "sgd"}),
        ("optimizer.nesterov", False, '"adamw"', {"optimizer.name": "muon"}),
        ("optimizer.matrices", "*.up", '"adamw"', {"optimizer.name": "muon"}),
    ],
)
def test_a_key_that_does_nothing_without_another_is_refused(key, value, without, with_it):
    message = _message({key: value})

    assert f"key `{key}`: expected nothing, as" in message
    assert without in message
    build_config(BUDGET, overrides={key: value, **with_it})


@pytest.mark.parametrize("name", ["sgd", "adagrad", "lion"])
def test_another_optimizer_may_be_named_for_a_file_that_has_betas(name):
    overrides = {"optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-6, "optimizer.name": name}

    assert build_config(BUDGET, overrides=overrides).optimizer.name == name


def test_nesterov_without_momentum_is_refused():
    message = _message({"optimizer.name": "sgd", "optimizer.nesterov": True})

    assert "key `optimizer.nesterov`: expected nothing, as" in message


def test_a_file_with_every_key_is_that_of_its_run():
    config = build_config(BUDGET)

    assert build_config(config.to_dict()) == config


def test_a_missing_budget_is_asked_for():
    with pytest.raises(ConfigError, match=r"`tiers.host.memory`.*400MiB"):
        build_config({})


def test_every_wrong_key_is_named_at_once():
    message = _message({"train.stepz": 1, "train.batch": 0})

    assert "train.stepz" in message
    assert "train.batch" in message
    assert len(message.splitlines()) == 2


def test_an_override_is_told_from_the_file():
    message = _message({"train.batch": 0})

    assert message.startswith("an override of config `run.toml`")


@pytest.mark.parametrize(
    ("text", "found"), [("train = [", "TOML"), ("\0", "TOML"), (b"\xff\xfe", "UTF-8")]
)
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path, text, found):
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigError, match=found) as caught:
        load_config(path)

    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config(tmp_path / "missing.toml")
