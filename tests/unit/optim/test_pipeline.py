"""The update pipeline over a store in memory whose transfers end, or fail, when told."""

import os

import numpy as np
import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import adamw, from_master, same_bits, to_fp32
from parity.sessions import PLACEMENTS, open_session, use_small_records

from offload.errors import StorageError, StoreError
from offload.layout import ParameterFacts, UnitFacts, build_layout
from offload.memory import Arena, Budget, SlotPool
from offload.optim.kernels import load_kernels
from offload.optim.pipeline import ModelState, ParameterUpdate, UpdatePipeline
from offload.optim.scalars import adamw_scalars
from offload.optim.window import Window

ELEMENTS = 4096  # one record each
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FAILURE = StorageError("cannot write: no space")


class Ticket:
    def __init__(self, error=None, *, run=lambda: None):
        self.error = error
        self.run = run
        self.was_awaited = False

    def done(self):
        return True

    def notify(self, event_fd):
        os.eventfd_write(event_fd, 1)

    def waits_for(self):
        return None

    def wait(self):
        self.was_awaited = True
        if self.error is not None:
            raise self.error
        self.run()


class MemoryStore:
    """Notes what is read and written, in order; `failing` ones raise when asked or awaited."""

    def __init__(self):
        self.values = {}
        self.staged = {}
        self.events = []
        self.tickets = []
        self.failing = set()
        self.refusing = set()

    def __contains__(self, record):
        return record in self.values

    def read(self, record, into, *, priority):
        return self._start(f"read {record}", lambda: self._fill(record, into))

    def write(self, record, source, *, num_bytes):
        values = bytes(source)
        return self._start(f"write {record}", lambda: self.values.update({record: values}))

    def write_staged(self, record, source, *, num_bytes):
        values = bytes(source)
        return self._start(f"stage {record}", lambda: self.staged.update({record: values}))

    def publish_staged(self, records):
        for record in records:
            if record in self.staged:
                self.events.append(f"publish {record}")
                self.values[record] = self.staged.pop(record)

    def drop_staged(self, records):
        for record in records:
            self.staged.pop(record, None)

    def _fill(self, record, into):
        into[: len(self.values[record])] = self.values[record]

    def _start(self, event, run):
        self.events.append(event)
        if event in self.refusing:
            raise FAILURE
        self.tickets.append(Ticket(FAILURE if event in self.failing else None, run=run))
        return self.tickets[-1]


class Harness:
    """Units `a`, `b`, … of one bf16 parameter and one record each, all on storage."""

    def __init__(
        self, *, units="abcd", num_buffers=2, num_cached=0, codec="split", num_places=None
    ):
        torch.manual_seed(0)
        facts = [
            UnitFacts(
                name=name,
                parameters=(ParameterFacts(name=f"{name}.p", shape=(ELEMENTS,), dtype="bfloat16"),),
            )
            for name in units
        ]
        self.layout = build_layout(facts, codec=codec, record_elements=ELEMENTS)
        self.store = MemoryStore()
        self.parameters = {}
        self.gradients = {}
        for name in units:
            self.parameters[name] = torch.randn(ELEMENTS).bfloat16()
            self.gradients[name] = torch.randn(ELEMENTS).bfloat16()
            values = self.parameters[name].view(torch.uint8).numpy().tobytes()
            self.store.values[f"parameter/{name}#0"] = values
        record = self.layout.records[0]
        self.budget = Budget(1 << 30, tier="host")
        self.pool = self._pool(num_buffers + num_cached, record.padded_bytes)
        self.parameter_pool = self._pool(num_places or num_buffers, record.padded_parameter_bytes)
        self.state = ModelState(
            layout=self.layout,
            store=self.store,
            parameters=None,
            records=None,
            gradients=self.gradients,
        )
        self.window = Window(
            self.layout,
            states=self.pool,
            parameters=self.parameter_pool,
            num_cached=num_cached,
            num_places=num_buffers if num_places is None else num_places,
        )
        self.pipeline = UpdatePipeline(self.state, self.window, load_kernels())

    def _pool(self, num_slots, slot_bytes):
        arena = Arena(num_slots * slot_bytes)
        arena.open()
        return SlotPool(arena.whole(), slot_bytes=slot_bytes, budget=self.budget, purpose="buffers")

    def run(self, units, *, step=1, order=None, kept=()):
        scalars = adamw_scalars(step=step, **OPTIONS)
        updates = {f"{name}.p": ParameterUpdate(scalars=scalars, scales=()) for name in units}
        self.pipeline.run(order or self.layout.records, updates, kept=kept)

    def stored_parameter(self, name):
        values = np.frombuffer(self.store.values[f"parameter/{name}#0"], dtype=np.uint8)
        return torch.from_numpy(values.copy()).view(torch.bfloat16)[:ELEMENTS]


@pytest.mark.parametrize("codec", ["split", "fp32"])
@pytest.mark.parametrize("num_buffers", [1, 2, 16])
def test_two_updates_equal_the_reference(num_buffers, codec):
    harness = Harness(num_buffers=num_buffers, codec=codec)

    for step in (1, 2):
        harness.run("abcd", step=step)

    for name in "abcd":
        p, g = to_fp32(harness.parameters[name]), to_fp32(harness.gradients[name])
        m = v = np.zeros_like(p)
        for step in (1, 2):
            p, m, v = adamw(p, g, m, v, step=step, **OPTIONS)
        assert same_bits(harness.stored_parameter(name), from_master(p, torch.bfloat16))
    assert harness.pool.num_free == num_buffers


def test_reads_run_ahead_by_the_window_and_each_record_is_written_before_its_buffer_is_reused():
    harness = Harness()
    harness.run("abcd")
    harness.store.events.clear()

    harness.run("abcd", step=2)

    records = [e for e in harness.store.events if " state/" in e]
    assert [event.removesuffix("#0") for event in records] == [
        *["read state/a", "read state/b", "write state/a"],
        *["read state/c", "write state/b", "read state/d", "write state/c", "write state/d"],
    ]


def test_records_are_taken_in_the_given_order():
    harness = Harness(num_buffers=1)
    harness.run("abcd")
    harness.store.events.clear()
    records = harness.layout.records

    harness.run("abcd", step=2, order=[records[2], records[0], records[3], records[1]])

    written = [e for e in harness.store.events if e.startswith("write state/")]
    assert written == [f"write state/{unit}#0" for unit in "cadb"]


def test_a_record_without_gradients_is_neither_read_nor_written():
    harness = Harness()
    harness.run("abcd")
    before = dict(harness.store.values)
    harness.store.events.clear()

    harness.run("bd", step=2)

    touched = {event.split("/")[1][0] for event in harness.store.events}
    assert touched == {"b", "d"}
    for key, values in harness.store.values.items():
        is_changed = key.split("/")[1][0] in "bd"
        assert (values != before[key]) == is_changed, key


def test_nothing_to_update_moves_nothing():
    harness = Harness()

    harness.run("")

    assert harness.store.events == []


def test_the_first_update_reads_no_state_that_was_never_written():
    harness = Harness(units="a")

    harness.run("a")

    assert harness.store.events == [
        "read parameter/a#0",
        "write state/a#0",
        "write parameter/a#0",
    ]


def test_a_whole_master_makes_the_old_parameter_superfluous():
    harness = Harness(units="a", codec="fp32")
    harness.run("a")
    harness.store.events.clear()

    harness.run("a", step=2)

    assert not any(event.startswith("read parameter/") for event in harness.store.events)


@pytest.mark.parametrize(
    "event", ["read state", "read parameter", "write state", "write parameter"]
)
@pytest.mark.parametrize("unit", "abd")
@pytest.mark.parametrize("way", ["failing", "refusing"])
def test_a_failed_transfer_gives_every_buffer_back_and_waits_for_the_others(event, unit, way):
    harness = Harness()
    harness.run("abcd")
    getattr(harness.store, way).add(f"{event}/{unit}#0")
    harness.store.tickets.clear()

    with pytest.raises(StorageError, match="no space"):
        harness.run("abcd", step=2)

    assert harness.pool.num_free == harness.pool.num_slots
    assert harness.budget.leased_bytes == 0
    assert all(ticket.was_awaited for ticket in harness.store.tickets)


def test_an_edit_is_kept_for_the_next_try_when_a_transfer_fails():
    harness = Harness()
    harness.run("abcd")
    harness.state.edited.add("a.p")
    harness.store.failing.add("write parameter/a#0")

    with pytest.raises(StorageError):
        harness.run("")

    assert harness.state.edited == {"a.p"}


class TestSession:
    @pytest.fixture
    def failed(self, tmp_path, monkeypatch):
        """Yields a session that was committed, and whose next update failed in the middle."""
        use_small_records(monkeypatch)
        with open_session(tmp_path, order="sequential", overlap="none") as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters())
            loss_of(model, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.commit({"step": 1})
            loss_of(model, 1).backward()
            write, count = session._store.write, 0

            def fail(record, *args, **kwargs):
                nonlocal count
                count += record.startswith("state/")
                ticket = write(record, *args, **kwargs)
                return Ticket(FAILURE, run=ticket.wait) if count == 4 else ticket

            monkeypatch.setattr(session._store, "write", fail)
            with pytest.raises(StorageError, match="no space"):
                optimizer.step()
            monkeypatch.setattr(session._store, "write", write)

            yield session, optimizer

    def test_refuses_commits_with_what_failed_and_what_to_do(self, failed):
        session, _ = failed

        with pytest.raises(StoreError, match=r"cannot commit.*no space.*resume from the last"):
            session.commit()

        assert session.stats().committed_step == 1

    def test_refuses_further_updates_and_digests(self, failed):
        session, optimizer = failed

        with pytest.raises(StoreError, match="cannot update"):
            optimizer.step()
        with pytest.raises(StoreError, match="cannot digest"):
            session.state_digest()

    def test_leaks_no_buffer_and_counts_no_step(self, failed):
        session, _ = failed
        buffers = session._wrapped._memory.host.states

        assert buffers.num_free == buffers.num_slots
        assert session.stats().completed_steps == 1

    def test_resumes_from_the_last_commit(self, failed, tmp_path):
        session, _ = failed
        session.close()

        with open_session(tmp_path, resume=True) as again:
            model = again.wrap(build(SmallGPT))
            optimizer = again.AdamW(model.parameters())

            assert again.metadata == {"step": 1}
            loss_of(model, 1).backward()
            optimizer.step()
            assert again.stats().completed_steps == 2


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_record_without_gradients_moves_no_bytes(tmp_path, monkeypatch, placement):
    use_small_records(monkeypatch)
    options = {"prefetch": 0, "order": "sequential", "overlap": "none"}
    with open_session(tmp_path, placement, **options) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.norm.weight.grad = torch.ones(32, dtype=torch.bfloat16)
        before = session.stats()

        optimizer.step()

        after = session.stats()
        layout = session._wrapped.layout
        shard = layout.parameters["norm.weight"][0].name
        (record,) = [r for r in layout.records if any(s.shard == shard for s in r.subgroups)]
        moved = record.padded_bytes if placement[1] == "storage" else 0
        moved += record.padded_parameter_bytes if placement[0] == "storage" else 0
        assert after.read_bytes - before.read_bytes == moved
        assert after.write_bytes - before.write_bytes == moved


def test_zeros_of_both_signs_are_not_one_factor(tmp_path):
    with open_session(tmp_path, ("host", "host"), overlap="none") as session:
        model = session.wrap(torch.nn.LayerNorm(4))  # both parameters in one record
        optimizer = session.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-0.0)
        model(torch.ones(2, 4)).sum().backward()
        model.weight.grad.fill_(1.0).mul_(0.0)
        model.bias.grad.fill_(1.0).mul_(-0.0)

        optimizer.step()

        # -0 - 1 * 0 and -0 - 1 * -0
        assert model.weight.signbit().all()
        assert not model.bias.signbit().any()


def test_what_stays_in_memory_is_prepared_for_updates_once(tmp_path, monkeypatch):
    prepared = []
    kernels = type(load_kernels())
    prepare = kernels.prepare
    monkeypatch.setattr(kernels, "prepare", lambda *args: prepared.append(1) or prepare(*args))
    with open_session(tmp_path, ("host", "host"), overlap="none") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())

        for index in range(3):
            loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()

        assert len(prepared) == sum(map(len, session._wrapped.layout.subgroups.values()))
