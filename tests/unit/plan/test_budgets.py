"""More host memory makes no planned step slower: what does not help is left unused."""

import itertools

import pytest

from offload.config import build_config
from offload.plan.machine import Machine, PathRates
from offload.plan.prediction import predict_step
from offload.plan.work import PassTimes
from offload.runs.planning import choices_of, plan_run
from offload.runs.rehearsal import RehearsedModel

MACHINE = Machine(
    paths=(
        PathRates(path="a", read_bytes_per_s=5e8, write_bytes_per_s=5e8, mixed_bytes_per_s=2.5e8),
    ),
    copy_bytes_per_s=1e10,
    update_parameters_per_s=3e8,
)
LADDER = [28, 40, 48, 56, 60, 68, 76, 84, 92, 96, 100, 104, 108, 120, 140]
"""MiB, where windows and caches of 6, 12 and 25 records take turns."""
ERROR = 1.02


@pytest.mark.parametrize(
    ("parameters", "order", "overlap"),
    [("storage", "alternating", "none"), ("host", "resident", "forward")],
)
def test_more_memory_predicts_no_slower_step(parameters, order, overlap):
    def predicted(memory):
        config = build_config(
            {
                "model": {"layers": 6, "width": 256, "heads": 4, "context": 64},
                "tiers": {"host": {"memory": f"{memory}MiB"}},
                "policy": {
                    "parameters": parameters,
                    "optimizer": "storage",
                    "order": order,
                    "overlap": overlap,
                },
            }
        )
        shared.append(shared[0] if shared else RehearsedModel.of(config))
        plan = plan_run(config, model=shared[0])
        step = predict_step(
            plan.layout,
            plan.host,
            plan.traffic,
            choices_of(config),
            machine=MACHINE,
            passes=[PassTimes(forward_s=0.005, backward_s=0.01)] * len(plan.layout.units),
            handed_over=plan.handed_over,
            kept=plan.kept,
            carried=plan.carried,
        ).step
        return step.step_s, plan.traffic.read_bytes

    shared = []
    found = [predicted(memory) for memory in LADDER]

    for (least_s, least_bytes), (step_s, read_bytes) in itertools.pairwise(found):
        assert step_s <= least_s * ERROR
        assert read_bytes <= least_bytes * ERROR
