import pytest

from offload.errors import PlanError
from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.host import plan_host
from offload.plan.run_plan import RunPlan
from offload.plan.storage import StoragePlan, store_bytes
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


def make_plan(*, budget_bytes=10**9, free_bytes=10**9, capacity_bytes=None):
    return RunPlan(
        layout=LAYOUT,
        host=plan_host(
            LAYOUT, budget_bytes=budget_bytes, parameters="storage", optimizer="storage"
        ),
        storage=StoragePlan(
            planned_bytes=store_bytes(LAYOUT, block_bytes=MIB, durability="commit", window_bytes=0),
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
        found = store_bytes(LAYOUT, block_bytes=MIB, durability=durability, window_bytes=5 * MIB)
        # 8 MiB are for manifests.
        assert found == versions * needed + (5 + 8) * MIB


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
