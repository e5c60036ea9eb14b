"""Exact lists of what updates under backward wait for on a device: the specification of settling.

Three units of one record each, `a` to `c`. A gradient `leaves` the device when backward has it and
`arrives` in host memory as late as it may: when somebody waits. A record is `updated` from host
memory, and `current` at the step.
"""

import pytest
import torch
from offload.policies.order import Resident
from parity.models import build
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state
from torch import nn

from offload.devices import EmulatedDevice
from offload.optim.early import EarlyUpdates
from offload.optim.pipeline import UpdatePipeline
from offload.storage.store import BlockStore
from offload.streaming.gradients import Gradients

WIDTH = 64


class Units(nn.Module):
    """Of 4095, 4096 and 4096 parameters: a record has no room for two."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(WIDTH, WIDTH - 1), nn.Linear(WIDTH - 1, WIDTH)
        self.units = nn.ModuleList([*layers, nn.Linear(WIDTH, WIDTH, bias=False)])

    def forward(self, x):
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x.float().square().mean()


NAMES = {
    (WIDTH - 1, WIDTH): "a.weight", (WIDTH - 1,): "a.bias",
    (WIDTH, WIDTH - 1): "b.weight", (WIDTH,): "b.bias",
    (WIDTH, WIDTH): "c.weight",
}  # fmt: skip


class LateCopy:
    """Moves its bytes when somebody waits for it."""

    def __init__(self, source, into, events):
        self.source, self.into, self.events = source, into, events

    def synchronize(self):
        if self.source is not None:
            self.events.append(f"{NAMES[tuple(self.into.shape)]} arrives")
            with torch.no_grad():
                self.into.copy_(self.source)
            self.source = None

    wait = synchronize

    def done(self):
        return self.source is None


@pytest.fixture
def events(monkeypatch):
    """Every update is over before backward goes on, so that there is one order.

    No record stays in memory, which would be updated at the step.
    """
    use_small_records(monkeypatch)
    monkeypatch.setattr(Resident, "kept", lambda *_, **__: frozenset())
    events = []
    arrived, compute = EarlyUpdates.arrived, UpdatePipeline.compute
    publish = BlockStore.publish_staged

    def copy_out(self, source, into):
        events.append(f"{NAMES[tuple(into.shape)]} leaves")
        return LateCopy(source, into, events)

    def arrive(self, name, **options):
        arrived(self, name, **options)
        self.finish()

    def compute_record(self, current, job):
        events.append(f"{unit_of(current.record.name)} updated")
        compute(self, current, job)

    def publish_record(self, keys):
        events.append(f"{unit_of(keys[0])} current")
        publish(self, keys)

    monkeypatch.setattr(EmulatedDevice, "copy_out", copy_out)
    monkeypatch.setattr(EarlyUpdates, "arrived", arrive)
    monkeypatch.setattr(UpdatePipeline, "compute", compute_record)
    monkeypatch.setattr(BlockStore, "publish_staged", publish_record)
    return events


def unit_of(record):
    return "abc"[int(record.partition("units.")[2][0])]


def open_steps(tmp_path, overlap="backward"):
    return open_session(tmp_path, device="emulated", overlap=overlap)


def take(events):
    taken = list(events)
    events.clear()
    return taken


def loss_of(model):
    return model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).to(torch.bfloat16))


BACKWARD = [
    *["c.weight leaves", "c.weight arrives", "c updated"],
    *["b.bias leaves", "b.weight leaves", "b.bias arrives", "b.weight arrives", "b updated"],
    *["a.bias leaves", "a.weight leaves", "a.bias arrives", "a.weight arrives", "a updated"],
]


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_a_record_is_updated_when_all_its_gradients_are_in_host_memory(tmp_path, events, overlap):
    reference = Reference(build(Units), **OPTIONS)
    with open_steps(tmp_path, overlap) as session:
        model = session.wrap(build(Units))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for _ in range(2):
            loss_of(model).backward()
            backward = take(events)
            optimizer.step()
            at_step = take(events)
            optimizer.zero_grad()
            loss_of(reference.model).backward()
            reference.step()
            reference.model.zero_grad()

            assert backward == BACKWARD
            assert at_step == ["c current", "b current", "a current"]
        require_equal_state(session, model, reference)


def test_no_record_is_updated_before_the_last_micro_step(tmp_path, events):
    with open_steps(tmp_path) as session:
        model = session.wrap(build(Units))
        session.AdamW(model.parameters(), **OPTIONS)
        with session.accumulating():
            loss_of(model).backward()
        first = take(events)
        loss_of(model).backward()

    assert first == [  # no more than one unit's bytes are on their way
        *["c.weight leaves", "c.weight arrives"],
        *["b.bias leaves", "b.weight leaves", "b.bias arrives"],
        *["a.bias leaves", "b.weight arrives", "a.weight leaves"],
    ]
    # Autograd adds to what is in host memory; an update waits for all that is on its way there.
    assert events == ["a.bias arrives", "a.weight arrives", "c updated", "b updated", "a updated"]


def test_updates_that_do_not_wait_for_gradients_are_found(tmp_path, events, monkeypatch):
    monkeypatch.setattr(Gradients, "settle", lambda self: None)

    with open_steps(tmp_path) as session:
        model = session.wrap(build(Units))
        session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model).backward()

    assert events[:2] == ["c.weight leaves", "c updated"]
