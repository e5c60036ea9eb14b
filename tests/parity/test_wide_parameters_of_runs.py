"""A run whose embedding and head fit no slot: planned in pieces, and trained as planned."""

import pytest

from offload.runs.planning import plan_run
from offload.sizes import MIB

WIDE = {"model__vocabulary": 20_000, "model__layers": 1, "policy__prefetch": 1}
"""5 MiB of bf16 in the embedding, and in the head, beside slots of 4 MiB."""


def test_the_plan_names_what_is_in_pieces_and_needs_less(small_config):
    fits = plan_run(small_config(tiers__host__memory="64MiB", **WIDE)).to_json()
    plan = plan_run(small_config(tiers__host__memory="15MiB", **WIDE)).to_json()
    never = plan_run(small_config(tiers__host__memory="1MiB", **WIDE)).to_json()

    assert fits["in_pieces"] == []
    assert plan["fits"], plan["reasons"]
    assert plan["smallest"]["host_memory"] < fits["smallest"]["host_memory"]
    assert never["smallest"]["host_memory"] == plan["smallest"]["host_memory"]
    found = {each["parameter"]: each for each in plan["in_pieces"]}
    assert set(found) == {"tokens.weight", "head.weight"}
    assert found["head.weight"]["num_bytes"] == 20_000 * 128 * 2
    assert found["head.weight"]["tile_bytes"] <= 2 * MIB
    assert found["head.weight"]["num_tiles"] == 3


@pytest.mark.slow
def test_a_run_in_pieces_stays_in_its_budget_near_the_one_in_memory(small_config, train, tmp_path):
    results = [
        train(small_config(**WIDE, **options), run_dir=tmp_path / str(index))
        for index, options in enumerate(
            [
                {"tiers__host__memory": "15MiB", "train__steps": 3},
                {"offload": False, "train__steps": 3},
            ]
        )
    ]

    tiled, plain = results
    assert tiled.host_peak_bytes <= 15 * MIB
    assert tiled.losses == pytest.approx(plain.losses, rel=1e-3)
