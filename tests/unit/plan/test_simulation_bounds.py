"""Whatever the policy and the machine: a simulated step takes its bound, and no more than all of
its parts one after the other."""

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.plan.device import plan_device
from offload.plan.handover import handed_over, handed_over_bytes, records_under_forward
from offload.plan.host_cut import plan_host
from offload.plan.link import link_traffic
from offload.plan.machine import LinkRates, Machine, PathRates
from offload.plan.prediction import Choices, predict_step
from offload.plan.spilling import SpilledBytes
from offload.plan.traffic import (
    ModelBytes,
    bytes_of_units,
    cached_state_bytes,
    kept_for_backward,
    step_traffic,
)
from offload.plan.work import PassTimes

ROUNDING = 1e-6
"""A simulated transfer ends within a thousandth of a byte."""
UPDATES = [
    ("resident", "forward"),
    ("resident", "none"),
    ("alternating", "none"),
    ("sequential", "none"),
    ("resident", "both"),
    ("resident", "backward"),
]
SECONDS = st.floats(0, 0.2)
SIZES = st.integers(1, 1 << 18)


@st.composite
def paths(draw, name):
    read, write = draw(st.floats(1e7, 1e9)), draw(st.floats(1e7, 1e9))
    half, full = 1 / (1 / read + 1 / write), min(read, write)
    mixed = half + draw(st.sampled_from([0.0, 0.5, 1.0])) * (full - half)
    return PathRates(
        path=name, read_bytes_per_s=read, write_bytes_per_s=write, mixed_bytes_per_s=mixed
    )


@st.composite
def machines(draw, *, has_link):
    link = LinkRates(
        in_bytes_per_s=draw(st.floats(1e7, 1e9)),
        out_bytes_per_s=draw(st.floats(1e7, 1e9)),
        latency_s=draw(st.sampled_from([0.0, 1e-3])),
    )
    return Machine(
        paths=tuple(draw(paths(name)) for name in "abc"[: draw(st.integers(1, 3))]),
        copy_bytes_per_s=draw(st.floats(1e9, 1e11)),
        update_parameters_per_s=draw(st.floats(1e7, 1e10)),
        link=link if has_link else None,
    )


@st.composite
def layouts(draw):
    sizes = draw(st.lists(SIZES, min_size=1, max_size=6))
    units = [
        UnitFacts(
            name=f"u{number}",
            parameters=(ParameterFacts(name=f"p{number}", shape=(size,), dtype="bfloat16"),),
        )
        for number, size in enumerate(sizes)
    ]
    return build_layout(
        units,
        codec=draw(st.sampled_from(["split", "fp32"])),
        record_elements=draw(st.sampled_from([1 << 14, 1 << 16, 1 << 20])),
    )


@st.composite
def predictions(draw, *, has_link):
    """A step of a small run with its bound, and the time of all of its parts in turn."""
    layout, machine = draw(layouts()), draw(machines(has_link=has_link))
    order, overlap = draw(st.sampled_from(UPDATES[:4] if has_link else UPDATES))
    on = ["storage", "host", "device"] if has_link else ["storage", "host"]
    parameters = "storage" if overlap in ("backward", "both") else draw(st.sampled_from(on))
    micro_steps, prefetch = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    options = {
        "parameters": parameters,
        "optimizer": "storage",
        "prefetch_distance": prefetch,
        "keeps_records": order != "sequential",
        "spills_gradients": draw(st.booleans()) and overlap == "none" and not has_link,
        "window_bytes": draw(st.sampled_from([1, 1 << 20, 1 << 26])),
        "is_unified": not has_link,
    }
    smallest = plan_host(layout, budget_bytes=0, **options).smallest_bytes
    more = draw(st.floats(0, 1.5)) * (layout.state_bytes + layout.parameter_bytes)
    host = plan_host(layout, budget_bytes=smallest + round(more), **options)
    device = None
    if has_link:
        device = plan_device(
            layout, budget_bytes=None, parameters=parameters, prefetch_distance=prefetch
        )
    num_slots = device.num_slots if device else host.num_slots
    kept = kept_for_backward(layout, num_slots)
    carried = layout.units[0].name if draw(st.booleans()) else None
    carried_bytes = bytes_of_units(layout, [carried])
    handed = frozenset()
    if parameters == "storage":
        records = records_under_forward(layout, order, overlap, host.num_cached)
        handed = handed_over(layout, min(num_slots, host.num_slots), records=records)
    traffic = step_traffic(
        ModelBytes.of(layout),
        parameters=parameters,
        optimizer="storage",
        micro_steps=micro_steps,
        cached_state_bytes=cached_state_bytes(layout, order, host.num_cached),
        kept_forward_bytes=[
            handed_over_bytes(layout, handed),
            *[carried_bytes] * (micro_steps - 1),
        ],
        kept_backward_bytes=[bytes_of_units(layout, kept)] * micro_steps,
        spilled=SpilledBytes.each_once(host.gradients.spilled_bytes, micro_steps),
    )
    link = None
    if has_link:
        link = link_traffic(
            layout,
            parameters=parameters,
            gradient_dtype="parameter",
            micro_steps=micro_steps,
            kept_later_bytes=carried_bytes,
            kept_backward_bytes=bytes_of_units(layout, kept),
            adds_on_device=draw(st.booleans()),
        )
    passes = [PassTimes(forward_s=draw(SECONDS), backward_s=draw(SECONDS)) for _ in layout.units]
    other_s = draw(SECONDS)
    prediction = predict_step(
        layout,
        host,
        traffic,
        Choices(
            parameters=parameters,
            optimizer="storage",
            order=order,
            overlap=overlap,
            striping=draw(st.sampled_from(["adaptive", "modulo", "single"])),
            prefetch=prefetch,
        ),
        machine=machine,
        passes=passes,
        other_s=other_s,
        handed_over=handed,
        kept=kept,
        carried=carried,
        shares_cores=draw(st.booleans()),
        link=link,
        device=device,
    )
    step = prediction.step
    parts_s = [
        other_s,
        micro_steps * sum(each.forward_s + each.backward_s for each in passes),
        machine.memory_s(
            num_parameters=layout.trainable_elements,
            read_bytes=step.read_bytes,
            write_bytes=step.write_bytes + layout.parameter_bytes,  # copies into slots
        ),
        (step.read_bytes + step.write_bytes)  # on the slower path: small records take turns
        / min(min(path.read_bytes_per_s, path.write_bytes_per_s) for path in machine.paths),
    ]
    if link is not None:
        padding = 4096 * len(layout.units)
        copies = len(layout.records) + (4 * micro_steps) * len(layout.units)
        parts_s += [
            (link.in_bytes + 2 * micro_steps * padding) / machine.link.in_bytes_per_s,
            (link.out_bytes + micro_steps * padding) / machine.link.out_bytes_per_s,
            copies * machine.link.latency_s,
        ]
    return prediction, traffic, sum(parts_s)


@settings(max_examples=80, deadline=None)
@given(predictions(has_link=False))
def test_a_step_takes_its_bound_and_no_more_than_its_parts_in_turn(found):
    prediction, traffic, serial_s = found

    assert prediction.step.step_s >= prediction.bound_s * (1 - ROUNDING)
    assert prediction.step.step_s <= serial_s * (1 + ROUNDING)
    assert prediction.step.read_bytes >= traffic.read_bytes
    assert prediction.step.write_bytes >= traffic.write_bytes


@settings(max_examples=80, deadline=None)
@given(predictions(has_link=True))
def test_a_step_on_a_device_takes_its_bound_and_no_more_than_its_parts_in_turn(found):
    prediction, traffic, serial_s = found

    assert prediction.step.step_s >= prediction.bound_s * (1 - ROUNDING)
    assert prediction.step.step_s <= serial_s * (1 + ROUNDING)
    assert prediction.step.read_bytes >= traffic.read_bytes
    assert prediction.step.write_bytes >= traffic.write_bytes
