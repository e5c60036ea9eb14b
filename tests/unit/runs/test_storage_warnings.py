"""What a plan says of a run whose state could be safer."""

from pathlib import Path

import pytest

from offload.config import build_config
from offload.runs.planned_storage import storage_warnings

DRAIN = "`checkpoint.drain`"
BOTH = f"`checkpoint.save_every` and {DRAIN}"


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ({}, None),
        ({"tiers.storage.commit_every": 10}, BOTH),
        ({"tiers.storage.commit_every": "10min"}, BOTH),
        ({"checkpoint.save_every": 10}, DRAIN),
        ({"tiers.storage.durability": "none"}, None),
    ],
)
def test_only_what_a_run_lacks_for_copies_of_its_checkpoints_is_named(overrides, missing):
    config = build_config({"tiers": {"host": {"memory": "1GiB"}}}, overrides=overrides)

    warnings = list(storage_warnings(config, [Path.cwd()], 0))

    assert [each.rpartition("; ")[2] for each in warnings] == (
        [f"set {missing}"] if missing else []
    )


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_a_drain_of_checkpoints_that_are_not_made_is_said_to_have_no_effect(durability):
    overrides = {"tiers.storage.durability": durability, "checkpoint.drain": str(Path.cwd())}
    config = build_config({"tiers": {"host": {"memory": "1GiB"}}}, overrides=overrides)

    warnings = list(storage_warnings(config, [Path.cwd()], 0))

    assert len(warnings) == 1
    assert "`checkpoint.drain` has no effect without `checkpoint.save_every`" in warnings[0]
