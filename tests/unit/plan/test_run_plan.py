from dataclasses import replace

import pytest

from offload.errors import ConfigError, PlanError
from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.explanation import explain
from offload.plan.host_cut import plan_host
from offload.plan.prediction import Choices
from offload.plan.run_plan import RunPlan
from offload.plan.storage import StoragePath, StoragePlan, store_space, usable_bytes
from offload.plan.traffic import ModelBytes, step_traffic
from offload.sizes import MIB

# A unit of 3 MiB in bf16, three times.
UNITS = [
    UnitFacts(
        name=f"unit{index}",
        parameters=(ParameterFacts(name=f"p{index}", shape=(3, MIB // 2), dtype="bfloat16"),),
    )
    for index in range(3)
]
LAYOUT = build_layout(UNITS, codec="split", record_elements=MIB)


def test_a_model_of_more_records_than_can_be_planned_is_refused():
    def of(elements):
        weight = ParameterFacts(name="w", shape=(elements,), dtype="bfloat16")
        return build_layout([UnitFacts(name="u", parameters=(weight,))], codec="split")

    of(1 << 40)

    with pytest.raises(ConfigError, match="cannot lay out a model of .* parameters: expected at"):
        of((1 << 40) + 1)


def make_plan(*, budget_bytes=10**9, free_bytes=10**9, capacity_bytes=None):
    return RunPlan(
        layout=LAYOUT,
        host=plan_host(
            LAYOUT, budget_bytes=budget_bytes, parameters="storage", optimizer="storage"
        ),
        storage=StoragePlan(
            space=store_space(LAYOUT, block_bytes=MIB, durability="commit", num_buffers=0),
            free_bytes=free_bytes,
            capacity_bytes=capacity_bytes,
        ),
        storage_path="/mnt/nvme0",
        traffic=step_traffic(
            ModelBytes.of(LAYOUT), parameters="storage", optimizer="storage", micro_steps=1
        ),
        policy={"order": "sequential"},
    )


def test_a_store_holds_two_versions_of_state_and_parameters_in_whole_blocks():
    # Each shard has two subgroups of 0.75 Mi elements: 7.5 MiB of state, 1.5 MiB of parameters,
    # which take 8 and 2 blocks.
    needed = 3 * 2 * (8 + 2) * MIB

    for durability, versions in (("commit", 2), ("none", 1)):
        found = store_space(LAYOUT, block_bytes=MIB, durability=durability, num_buffers=2)
        # 8 MiB are for manifests, and two records have one version more while they are written.
        assert found.total_bytes == versions * needed + (2 * (8 + 2) + 8) * MIB


def test_each_checkpoint_keeps_a_version_more_and_frozen_parameters_one_in_all():
    frozen = ParameterFacts(name="q", shape=(MIB,), dtype="bfloat16", is_trainable=False)
    layout = build_layout([*UNITS, UnitFacts(name="last", parameters=(frozen,))], codec="split")
    version = store_space(LAYOUT, block_bytes=MIB, durability="none", num_buffers=0).version_bytes

    space = store_space(
        layout, block_bytes=MIB, durability="commit", num_buffers=0, num_checkpoints=3
    )

    assert space.frozen_bytes == 2 * MIB
    assert space.total_bytes == (2 + 3) * space.version_bytes + (2 + 8) * MIB
    assert abs(space.version_bytes - version) <= 6 * MIB  # cut into other records


def test_paths_on_one_device_share_its_free_bytes_and_a_margin_stays_free():
    def path(device, free, capacity=None, taken=0):
        return StoragePath(
            device=device, total_bytes=10_000, free_bytes=free, taken_bytes=taken,
            capacity_bytes=capacity,
        )  # fmt: skip

    assert usable_bytes([path(1, 1000), path(1, 1000)]) == 900
    assert usable_bytes([path(1, 1000), path(2, 500)]) == 900 + 400
    assert usable_bytes([path(1, 1000, taken=300), path(1, 1000, taken=50)]) == 900 + 350
    assert usable_bytes([path(1, 1000, capacity=200), path(1, 1000, capacity=100)]) == 300
    assert usable_bytes([path(1, 50)]) == 0


def test_a_budget_below_the_smallest_names_the_smallest_and_that_one_fits():
    smallest = make_plan().to_json()["smallest"]["host_memory"]

    refused = make_plan(budget_bytes=smallest - 1)

    assert not refused.fits
    with pytest.raises(PlanError, match=str(smallest)):
        refused.require_fit()
    assert make_plan(budget_bytes=smallest).fits


def test_too_little_free_space_or_capacity_is_refused_with_both_figures():
    needed = make_plan().to_json()["smallest"]["storage"]

    refused = make_plan(free_bytes=needed - 1, capacity_bytes=needed - 2)

    assert len(refused.reasons) == 2
    with pytest.raises(
        PlanError, match=rf"(?s){needed - 1}.*tiers\.storage\.capacity.*{needed - 2}"
    ):
        refused.require_fit()
    assert make_plan(free_bytes=needed, capacity_bytes=needed).fits


def test_json_has_the_keys_that_scripts_rely_on():
    found = make_plan().to_json()

    assert set(found) >= {
        "fits", "reasons", "smallest", "tiers", "policy", "predicted", "machine"
    }  # fmt: skip
    assert set(found["smallest"]) == {"host_memory", "device_memory", "storage"}
    assert set(found["tiers"]) == {"device", "host", "storage"}
    for tier in found["tiers"].values():
        assert set(tier) >= {"budget_bytes", "planned_bytes"}
    assert set(found["predicted"]) == {
        "step_s", "forward_s", "backward_s", "update_s", "exposed_io_s", "bound_s",
        "read_bytes_per_step", "write_bytes_per_step", "rss_peak_bytes", "written_bytes_per_day",
        "tokens_to_hide_io",
    }  # fmt: skip
    assert found["tiers"]["host"]["planned_bytes"] <= found["tiers"]["host"]["budget_bytes"]


@pytest.mark.parametrize(
    ("num_buffers", "num_places", "num_cached", "why"),
    [  # of six records
        (4, 4, 0, "enough to read, update and write at one time"),
        (1, 1, 0, "the budget has room for no more"),
        (1, 3, 2, "less than a smaller cache would cost"),
        (2, 6, 4, "enough to read, update and write at one time"),
    ],
)
def test_the_reason_of_a_window_counts_the_records_that_the_cache_brings(
    num_buffers, num_places, num_cached, why
):
    plan = make_plan()
    host = replace(plan.host, num_buffers=num_buffers, num_places=num_places, num_cached=num_cached)
    choices = Choices(
        parameters="storage",
        optimizer="storage",
        order="alternating",
        overlap="none",
        striping="adaptive",
        prefetch=2,
    )

    lines = {c.choice: c.why for c in explain(LAYOUT, host, plan.traffic, choices)}

    assert len(LAYOUT.records) == 6
    assert why in lines["subgroups and window"]
