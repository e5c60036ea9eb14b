import pytest

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.spilling import SpilledBytes
from offload.plan.traffic import (
    ModelBytes,
    bytes_of_units,
    cached_state_bytes,
    is_in_turns,
    kept_for_backward,
    step_traffic,
)

MB = 10**6
# 85 M parameters in bf16 under `split`: 2 bytes each, 10 bytes of state.
MODEL = ModelBytes(
    parameter_bytes=170 * MB,
    trainable_parameter_bytes=170 * MB,
    update_parameter_bytes=170 * MB,
    state_bytes=850 * MB,
)


@pytest.mark.parametrize(
    "parameters, optimizer, micro_steps, read, written",
    [
        # state + 2 micro-steps x (forward + backward) + update
        ("storage", "storage", 2, 850 + 2 * (170 + 170) + 170, 850 + 170),
        ("storage", "storage", 1, 850 + 170 + 170 + 170, 850 + 170),
        ("storage", "host", 1, 3 * 170, 170),
        ("host", "storage", 2, 850, 850),
        ("host", "host", 2, 0, 0),
    ],
)
def test_bytes_follow_from_the_placement(parameters, optimizer, micro_steps, read, written):
    traffic = step_traffic(
        MODEL, parameters=parameters, optimizer=optimizer, micro_steps=micro_steps
    )

    assert traffic.read_bytes == read * MB
    assert traffic.write_bytes == written * MB


def test_a_cache_shortens_state_both_ways_and_spilled_gradients_are_counted():
    traffic = step_traffic(
        MODEL,
        parameters="host",
        optimizer="storage",
        micro_steps=2,
        cached_state_bytes=100 * MB,
        spilled=SpilledBytes.each_once(20 * MB, 2),
    )

    assert traffic.read_bytes == (750 + 40) * MB
    assert traffic.write_bytes == (750 + 40) * MB


def _layout(codec, dtype):
    facts = (
        ParameterFacts(name="a", shape=(1000,), dtype=dtype),
        ParameterFacts(name="b", shape=(24, 3), dtype=dtype, is_trainable=False),
    )
    return build_layout([UnitFacts(name="unit", parameters=facts)], codec=codec)


@pytest.mark.parametrize(
    "codec, dtype, state, read_by_update",
    [
        ("split", "bfloat16", 10, 2),
        # The whole master is in the state: the update does not need the old parameter.
        ("fp32", "bfloat16", 12, 0),
        ("split", "float32", 8, 4),
        ("fp32", "float32", 8, 4),
    ],
)
def test_model_bytes_follow_from_codec_and_dtype(codec, dtype, state, read_by_update):
    found = ModelBytes.of(_layout(codec, dtype))

    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    assert found.parameter_bytes == (1000 + 72) * itemsize
    assert found.trainable_parameter_bytes == 1000 * itemsize
    assert found.state_bytes == 1000 * state
    assert found.update_parameter_bytes == 1000 * read_by_update


def test_the_last_units_of_forward_one_for_each_slot_stay_for_backward():
    units = [
        UnitFacts(name=name, parameters=(ParameterFacts(name=name, shape=(n,), dtype="bfloat16"),))
        for name, n in (("a", 10), ("b", 100), ("c", 1000))
    ]
    layout = build_layout(units, codec="split")

    kept = [
        bytes_of_units(layout, kept_for_backward(layout, slots)) for slots in (-1, 0, 1, 2, 3, 4)
    ]

    assert kept == [0, 0, 2000, 2200, 2220, 2220]


@pytest.mark.parametrize(
    ("order", "elements"),
    # Of 4096, 4096, 4096 and 512 elements two stay: the last two and the first two in turns.
    [("alternating", (4096 + 512 + 4096 + 4096) // 2), ("resident", 8192), ("sequential", 0)],
)
def test_what_a_step_finds_in_memory_is_the_mean_of_two_steps(order, elements):
    facts = (ParameterFacts(name="weight", shape=(3 * 4096 + 512,), dtype="bfloat16"),)
    layout = build_layout(
        [UnitFacts(name="unit", parameters=facts)], codec="split", record_elements=4096
    )

    found = cached_state_bytes(layout, order, 2)
    odd, even = (cached_state_bytes(layout, order, 2, steps=steps) for steps in ([3, 5], [4]))

    assert [record.num_bytes for record in layout.records] == [40960, 40960, 40960, 5120]
    assert found == elements * 10 == (odd + even) // 2
    assert (odd != even) == is_in_turns(order) == (order == "alternating")
    # An odd step begins with the first two, which the step before it came to last.
    assert odd == even or (odd, even) == (2 * 40960, 40960 + 5120)


@pytest.mark.parametrize(
    ("codec", "state", "read_by_update"),
    [("split", 10, 2 * 3072), ("fp32", 12, 2 * 1024)],  # what a master does not say is read
)
def test_a_record_without_any_gradient_is_neither_read_nor_written(codec, state, read_by_update):
    units = [
        UnitFacts(
            name=name,
            parameters=tuple(
                ParameterFacts(name=f"{name}{n}", shape=(512,), dtype="bfloat16") for n in (0, 1)
            ),
        )
        for name in "abcd"
    ]
    layout = build_layout(units, codec=codec, record_elements=1024)
    without = {"a0", "a1", "b1"}

    found = ModelBytes.of(layout, without_gradient=without)

    assert [record.num_bytes for record in layout.records] == [1024 * state] * 4
    assert found.parameter_bytes == 4096 * 2
    assert found.state_bytes == 3072 * state
    assert found.trainable_parameter_bytes == 3072 * 2
    assert found.update_parameter_bytes == read_by_update
    kept = [cached_state_bytes(layout, "resident", n, without_gradient=without) for n in range(5)]
    assert kept[0] == 0
    assert kept[4] == 3072 * state
