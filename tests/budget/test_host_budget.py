"""The host budget is hard, its smallest is exact, and bytes moved are those of the formula."""

import re
from pathlib import Path

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn

from offload.errors import PlanError


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Keeps torch's threads from waiting for those of other tests' processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("emulated", marks=pytest.mark.slow)], autouse=True)
def device(request, monkeypatch):
    """The device of the test's sessions."""
    monkeypatch.setattr("parity.sessions.DEVICE", request.param)
    return request.param


def smallest_bytes(tmp_path, placement, make, **options):
    with open_session(tmp_path / "planned", placement, budget_bytes=1 << 30, **options) as session:
        session.wrap(make())
        return session._wrapped.plan.smallest_bytes


@pytest.mark.parametrize("options", [
    pytest.param({}, id="default"),
    pytest.param(
        {"gradient_dtype": "float32", "codec": "fp32"}, id="fp32", marks=pytest.mark.slow
    ),
])  # fmt: skip
@pytest.mark.parametrize("tie", [None, "identity"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_the_smallest_budget_trains_exactly_and_one_byte_less_is_refused(
    tmp_path, monkeypatch, placement, tie, options
):
    use_small_records(monkeypatch)

    def make():
        return build(SmallGPT, tie=tie)

    smallest = smallest_bytes(tmp_path, placement, make, **options)
    plain = make()
    if "gradient_dtype" in options:
        for parameter in plain.parameters():
            parameter.grad_dtype = torch.float32
    reference = Reference(plain, **OPTIONS)

    with open_session(tmp_path, placement, budget_bytes=smallest, **options) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2, micro_steps=2, max_norm=0.05)
        require_equal_state(session, model, reference)
        assert session.stats().host_peak_bytes <= smallest

    refused = tmp_path / "refused"
    with (
        open_session(refused, placement, budget_bytes=smallest - 1, **options) as session,
        pytest.raises(PlanError, match=rf"at least {smallest} bytes.*found {smallest - 1} bytes"),
    ):
        session.wrap(make())


def test_a_refused_model_is_left_as_it_was(tmp_path):
    expected = build(SmallGPT)

    with open_session(tmp_path, budget_bytes=1000) as session:
        model = build(SmallGPT)
        with pytest.raises(PlanError, match=re.escape('raise `tiers.host.memory` to "1MiB"')):
            session.wrap(model)

    assert torch.equal(loss_of(model, 0), loss_of(expected, 0))
    assert type(model) is SmallGPT


@pytest.mark.parametrize("extra_bytes", [0, 4095, 100_000, 1 << 30])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_no_budget_is_exceeded_by_plan_or_peak(tmp_path, monkeypatch, placement, extra_bytes):
    use_small_records(monkeypatch)
    budget_bytes = smallest_bytes(tmp_path, placement, lambda: build(SmallGPT)) + extra_bytes

    with open_session(tmp_path, placement, budget_bytes=budget_bytes) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        for index in range(2):
            loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, 3)

        plan = session._wrapped.plan
        num_records = len(session._wrapped.layout.records)
        slots = plan.slot_bytes * plan.num_slots
        window = plan.buffer_bytes * min(plan.num_buffers, num_records)
        always = plan.planned_bytes - slots - plan.buffer_bytes * plan.num_buffers
        assert plan.planned_bytes <= budget_bytes
        # Units are fetched while records are updated.
        peak_bytes = session.stats().host_peak_bytes
        assert always <= peak_bytes <= always + slots + window
        if extra_bytes == 0:
            assert peak_bytes >= always + max(slots, window)


# On a device with memory of its own host slots stage units, and come back when these are copied.
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_an_update_alone_empties_the_slots_before_it_fills_the_window(tmp_path, monkeypatch):
    use_small_records(monkeypatch)
    smallest = smallest_bytes(tmp_path, PLACEMENTS[-1], lambda: build(SmallGPT))

    with open_session(tmp_path, budget_bytes=smallest, overlap="none") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        loss_of(model, 0).backward()
        optimizer.step()

        plan = session._wrapped.plan
        largest = max(plan.slot_bytes * plan.num_slots, plan.buffer_bytes * plan.num_buffers)
        assert session.stats().host_peak_bytes == plan.gradients.fixed_bytes + largest


@pytest.mark.parametrize("checkpoint", ["none", "unit"])
def test_holes_of_the_heap_are_limited_in_passes_that_keep_activations(
    tmp_path, monkeypatch, device, checkpoint
):
    limits = []
    monkeypatch.setattr(
        "offload.streaming.attachment.HeapHoles.limit", lambda _, limit: limits.append(limit)
    )
    config = {"activations": {"checkpoint": checkpoint}}
    with open_session(tmp_path, budget_bytes=24 << 20, config=config) as session:
        model = session.wrap(build(SmallGPT))
        with torch.no_grad():
            loss_of(model, 0)
        assert limits == []

        loss = loss_of(model, 0)
        num_forward = len(limits)
        loss.backward()

    # After each module of a unit, and the model; in backward before each unit but the first's.
    expected = (7, 10) if device == "cpu" else (0, 0)  # elsewhere activations are not in the heap
    assert (num_forward, len(limits)) == expected
    assert set(limits) <= {1 << 20}


@pytest.mark.parametrize("codec, micro_steps, overlap", [
    ("split", 2, "forward"),
    pytest.param("split", 1, "none", marks=pytest.mark.slow),
    pytest.param("fp32", 2, "none", marks=pytest.mark.slow),
    pytest.param("fp32", 1, "forward", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_bytes_per_step_are_those_of_the_formula(tmp_path, placement, codec, micro_steps, overlap):
    # 9.5 M parameters, so that padding to 4,096 bytes stays far below 1 %.
    model = build(SmallGPT, width=512, layers=3)
    elements = sum(p.numel() for p in model.parameters())
    state_bytes = {"split": 10, "fp32": 12}[codec] * elements
    read = write = 0
    if placement[1] == "storage":
        read += state_bytes
        write += state_bytes
    if placement[0] == "storage":
        # A whole master in the state makes the old parameter superfluous.
        read += 2 * elements if codec == "split" else 0
        write += 2 * elements

    options = {"codec": codec, "budget_bytes": 150 << 20, "overlap": overlap}
    with open_session(tmp_path, placement, **options) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters())
        plan, records = session._wrapped.plan, session._wrapped.layout.records
        if placement[0] == "storage":
            # The last units stay for backward, one for each slot; nobody asks for the embedding's.
            units = [*model.blocks, nn.ModuleList([model.norm, model.head])]
            read_again = units[: max(len(units) - plan.num_slots, 0)]
            in_backward = sum(p.numel() for unit in read_again for p in unit.parameters())
            read += micro_steps * 2 * (elements + in_backward)
            if overlap == "forward":
                # Of two steps the first one's updates fill every slot as it is needed; the last
                # one's, for which `train` waits, fill those that there are.
                first = [model.tokens, *units][: plan.num_slots]
                at_once = sum(p.numel() for unit in first for p in unit.parameters())
                read -= 2 * (elements + at_once) // 2
        if placement[1] == "storage":  # what stays in memory is not moved
            kept = [i * len(records) // plan.num_cached for i in range(plan.num_cached)]
            read -= sum(records[i].num_bytes for i in kept)
            write -= sum(records[i].num_bytes for i in kept)
        train(session, optimizer, steps=2, micro_steps=micro_steps)
        before, kernel_before = session.stats(), kernel_bytes()
        train(session, optimizer, steps=2, micro_steps=micro_steps)
        after, kernel_after = session.stats(), kernel_bytes()

    moved_read = (after.read_bytes - before.read_bytes) / 2
    moved_write = (after.write_bytes - before.write_bytes) / 2
    assert moved_read == pytest.approx(read, rel=0.01)
    assert moved_write == pytest.approx(write, rel=0.01)
    if counts_bytes(tmp_path):
        assert (kernel_after[0] - kernel_before[0]) / 2 == pytest.approx(
            moved_read, rel=0.01, abs=1 << 17
        )
        assert (kernel_after[1] - kernel_before[1]) / 2 == pytest.approx(
            moved_write, rel=0.01, abs=1 << 17
        )


def train(session, optimizer, *, steps, micro_steps):
    """Trains, and waits for the last update and the units that were begun to be fetched."""
    model = session._wrapped.model
    for _ in range(steps):
        for index in range(micro_steps):
            loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    session._wrapped._updates.finish()
    for unit in session._wrapped.residency.units if session._wrapped.residency else ():
        for transfer in unit.transfers:
            transfer.wait()


def kernel_bytes():
    """Returns what the kernel says that this process read from and wrote to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counters = dict(line.split(": ") for line in lines)
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def counts_bytes(path):
    """Returns whether the kernel counts what is written to this file system."""
    before = kernel_bytes()[1]
    (path / "probe").write_bytes(bytes(1 << 20))
    return kernel_bytes()[1] - before >= 1 << 20
