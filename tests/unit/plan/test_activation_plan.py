import pytest

from offload.plan.activations import plan_activations
from offload.sizes import MIB


@pytest.mark.parametrize(
    ("offload", "memory", "threshold", "slots", "slot_bytes"),
    [
        ("none", MIB, 1, 0, 4096),
        ("host", MIB, 1, 256, 4096),
        ("host", MIB, 4097, 128, 8192),
        ("host", 4 * MIB, 3 * MIB, 4, MIB),  # several slots for one activation
        ("host", 1, 1, 1, 4096),
        ("storage", 64 * MIB, 1, 64, MIB),
        ("storage", MIB, MIB, 16, 65536),
        ("storage", 1, 1, 1, 4096),
    ],
)
def test_memory_is_cut_into_whole_slots(offload, memory, threshold, slots, slot_bytes):
    plan = plan_activations(offload, memory_bytes=memory, threshold_bytes=threshold)

    assert plan.slot_bytes == slot_bytes
    assert plan.memory_bytes == slots * slot_bytes
