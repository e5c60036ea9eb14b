"""Updates under the next forward change no bit, whatever comes between two steps."""

import contextlib
import copy
import threading

import pytest
import torch
from parity.models import SmallGPT, batch, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn

from offload.errors import ConfigError, StorageError, StoreError

EITHER = [
    pytest.param(p, marks=[pytest.mark.slow] if p[1] == "host" else [], id="-".join(p))
    for p in PLACEMENTS
]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


@pytest.fixture(params=EITHER)
def placement(request):
    return request.param


def program(session, *, optimizer_options=OPTIONS, clips=True):
    """Yields losses, norms and digests of a loop that does all kinds of things between steps."""
    model = session.wrap(build(SmallGPT))
    optimizer = session.AdamW(model.parameters(), **optimizer_options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)

    def backward(index):
        loss = loss_of(model, index)
        loss.backward()
        return loss.item()

    for index in range(4):  # clipped in every second step
        yield backward(index)
        if index % 2 and clips:
            yield float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    optimizer.param_groups[0]["weight_decay"] = 0.5  # an update with 0.1 is pending
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    yield backward(4)
    model.head.weight.grad[0, 0] = float("inf")
    yield float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.zero_grad()  # a step that is not finite is skipped
    yield backward(5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # written while the update has to read them

    model.eval()
    with torch.no_grad():
        yield loss_of(model, 50).item()
        tokens = batch(0)[0][:, :3]
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        yield tokens.tolist()
    model.train()
    yield backward(6)
    optimizer.step()  # and the gradients stay: the next ones are added to them
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(0.5)
    yield backward(7)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.head.weight.add_(0.01)
    yield session.state_digest()

    yield backward(8)
    optimizer.step()
    optimizer.zero_grad()
    (model.tokens.weight[:3].float().sum() * 2).backward()  # reaches one unit only
    optimizer.step()
    optimizer.step()  # the same gradients once more, with nothing between
    optimizer.zero_grad()
    yield {name: values.tolist() for name, values in model.state_dict().items()}
    yield session.state_digest()


def test_a_program_with_everything_between_steps_computes_the_same(tmp_path, placement):
    found = {}
    for overlap in ("none", "forward"):
        with open_session(tmp_path / overlap, placement, overlap=overlap) as session:
            found[overlap] = list(program(session))

    assert found["forward"] == found["none"]


@pytest.mark.parametrize("extra_bytes", [0, 300_000])
@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_updates_under_backward_compute_the_same(tmp_path, overlap, extra_bytes):
    found = []
    for name in ("none", overlap):
        options = {"overlap": name, "budget_bytes": 600_000 + extra_bytes}
        with open_session(tmp_path / name, **options) as session:
            found.append(list(program(session, clips=False)))

    assert found[1] == found[0]


class TestBackward:
    @pytest.fixture(params=["backward", "both"])
    def session(self, request, tmp_path):
        with open_session(tmp_path, overlap=request.param, budget_bytes=600_000) as session:
            yield session

    def test_micro_steps_before_the_last_update_nothing(self, session):
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        for step in range(2):
            with session.accumulating():
                loss_of(model, 2 * step).backward()
                assert session._wrapped._updates.early._applied == {}
            loss_of(model, 2 * step + 1).backward()
            assert session._wrapped._updates.early._applied != {}
            for index in (2 * step, 2 * step + 1):
                loss_of(reference.model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()

        require_equal_state(session, model, reference)

    def test_accumulating_nests_and_ends_with_an_exception(self, session):
        with pytest.raises(StoreError, match="no model is wrapped"), session.accumulating():
            pass
        model = session.wrap(build(SmallGPT))
        session.AdamW(model.parameters(), **OPTIONS)
        early = session._wrapped._updates.early

        with contextlib.suppress(KeyError), session.accumulating():
            with session.accumulating():
                pass
            loss_of(model, 0).backward()
            assert early._applied == {}
            raise KeyError
        loss_of(model, 1).backward()

        assert early._applied != {}

    def test_clipping_by_a_global_norm_is_refused_and_changes_nothing(self, session):
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        digest = session.state_digest()
        loss_of(model, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        with pytest.raises(ConfigError, match=r"under backward.*clipped.*policy.overlap"):
            optimizer.step()

        assert session.state_digest() == digest
        optimizer.step()  # by itself it can
        assert session.state_digest() != digest

    @pytest.mark.parametrize("overlap", ["backward", "both"])
    def test_clipping_has_its_plain_effect_where_memory_keeps_all_records(self, tmp_path, overlap):
        reference = Reference(build(SmallGPT), **OPTIONS)
        with open_session(tmp_path, overlap=overlap, budget_bytes=16 << 20) as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.AdamW(model.parameters(), **OPTIONS)
            for index in range(2):
                loss_of(model, index).backward()
                assert not session._wrapped._updates.early.has_begun
                loss_of(reference.model, index).backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                assert norm.item() == reference.clip(0.01) > 0.01
                optimizer.step()
                optimizer.zero_grad()
                reference.step()
                reference.model.zero_grad()
            require_equal_state(session, model, reference)

    def test_a_commit_and_a_backward_without_a_step_leave_the_last_state(self, session):
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        digest = session.state_digest()

        loss_of(model, 0).backward()
        session.save("before")
        assert session.state_digest() == digest
        loss_of(model, 1).backward()
        optimizer.zero_grad()
        session.load("before")

        assert session.state_digest() == digest
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        require_equal_state(session, model, reference)


def test_the_smallest_memory_and_a_cache_of_all_records_compute_the_same(tmp_path):
    with open_session(tmp_path / "plan") as session:
        session.wrap(build(SmallGPT))
        smallest = session._wrapped.plan.smallest_bytes
    found = []
    for budget_bytes in (smallest, smallest + 200_000, 4 << 20):
        with open_session(tmp_path / str(budget_bytes), budget_bytes=budget_bytes) as session:
            found.append(list(program(session)))
            assert session.stats().host_peak_bytes <= budget_bytes

    assert found[0] == found[1] == found[2]


def one_step(session, **options):
    model = session.wrap(build(SmallGPT, **options))
    optimizer = session.AdamW(model.parameters(), **OPTIONS)
    loss_of(model, 0).backward()
    optimizer.step()
    return model, optimizer


def reference_after_one_step(**options):
    reference = Reference(build(SmallGPT, **options), **OPTIONS)
    loss_of(reference.model, 0).backward()
    reference.step()
    return reference


def test_while_an_update_is_pending_parameters_are_out_of_reach_by_iteration(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model, _ = one_step(session)

        assert all(p.isnan().all() for p in model.parameters())
        expected = reference_after_one_step()
        assert same_bits(model.head.weight, expected.model.head.weight)
        assert not model.head.weight.isnan().any()


@pytest.mark.parametrize("look", [
    pytest.param(lambda model: model.state_dict(), id="state_dict"),
    pytest.param(lambda model: copy.deepcopy(model).state_dict(), id="deepcopy"),
])  # fmt: skip
def test_copies_have_the_new_values(tmp_path, placement, look):
    with open_session(tmp_path, placement) as session:
        model, _ = one_step(session)

        found = look(model)

        for name, values in reference_after_one_step().model.state_dict().items():
            assert same_bits(found[name], values), name


@pytest.mark.parametrize("tie", ["identity", "function"])
def test_tied_and_frozen_parameters(tmp_path, placement, tie):
    models = [build(SmallGPT, tie=tie) for _ in range(2)]
    for model in models:
        model.blocks[1].up.weight.requires_grad_(False)
    reference = Reference(models[0], **OPTIONS)

    with open_session(tmp_path, placement) as session:
        model = session.wrap(models[1])
        optimizer = session.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
        train_both(model, optimizer, reference, steps=3, micro_steps=2, max_norm=0.05)
        require_equal_state(session, model, reference)


def test_a_commit_of_a_pending_step_is_what_a_resume_finds(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model, optimizer = one_step(session)
        session.commit({"step": 1})
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()  # pending, and lost

    with open_session(tmp_path, placement, resume=True) as session:
        session.wrap(build(SmallGPT))
        assert session.metadata == {"step": 1}
        assert session.state_digest() == reference_after_one_step().digest()


def test_going_back_to_a_checkpoint_drops_what_is_pending(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model, optimizer = one_step(session)
        session.save("first")
        loss_of(model, 1).backward()
        optimizer.step()
        session.load("first")

        require_equal_state(session, model, reference_after_one_step())


@pytest.mark.unified  # on a device they are in slots
def test_resident_parameters_have_their_values_after_the_session(tmp_path):
    with open_session(tmp_path, ("host", "storage")) as session:
        model, _ = one_step(session)

    for name, values in reference_after_one_step().model.state_dict().items():
        assert same_bits(model.state_dict()[name], values), name
    assert type(model) is SmallGPT


@pytest.mark.unified  # on a device they are in slots
def test_data_put_in_the_place_of_a_pending_parameter_is_an_edit(tmp_path):
    with open_session(tmp_path, ("host", "storage")) as session:
        model, optimizer = one_step(session)
        optimizer.zero_grad()
        reference = reference_after_one_step()
        reference.model.zero_grad()
        new = torch.full_like(reference.model.norm.weight, 0.25).detach()
        dict(model.named_parameters())["norm.weight"].data = new.clone()
        reference.model.norm.weight.data = new.clone()
        reference.edited("norm.weight")

        train_both(model, optimizer, reference, steps=2, first=1)
        require_equal_state(session, model, reference)


@pytest.mark.unified
@pytest.mark.parametrize("write", [
    lambda bias: bias[0].fill_(1.0),
    lambda bias: bias.fill_(torch.nan),
    lambda bias: bias.data.fill_(torch.nan),
    lambda bias: bias[0].mul_(2.0),  # NaN as before
])  # fmt: skip
def test_a_write_to_a_pending_parameter_past_its_module_is_refused(tmp_path, write):
    with open_session(tmp_path, ("host", "storage")) as session:
        model, _ = one_step(session)
        bias = dict(model.named_parameters())["norm.bias"]
        with torch.no_grad():
            write(bias)  # to the one element of the placeholder

        with pytest.raises(StoreError, match=r"`norm.bias`.*nothing written.*attribute of its"):
            loss_of(model, 1)
        bias.data = torch.zeros(32, dtype=torch.bfloat16)


def test_an_old_graph_is_refused_after_a_step_that_is_pending(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()


def test_matrices_that_are_updated_whole(tmp_path):
    found = []
    for overlap in ("none", "forward"):
        with open_session(tmp_path / overlap, overlap=overlap, optimizer="muon") as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.Muon(model.parameters(), lr=0.01)
            for index in range(3):
                loss_of(model, index).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(session.state_digest())

    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", ["none", "forward", "backward", "both"])
def test_waits_are_accounted_by_path_and_cause(tmp_path, overlap):
    slow = {"tiers": {"storage": {"rate_limit": "10MB"}}}
    options = {"overlap": overlap, "prefetch": 0, "budget_bytes": 600_000}
    with open_session(tmp_path, config=slow, **options) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for index in range(2):
            loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = session.stats()
        root = session._store.roots[0]

    on_path = {stall.cause for stall in stats.stalls if stall.waits_for == f"path {root}"}
    assert "fetching a unit" in on_path
    assert {stall.waits_for for stall in stats.stalls} <= {
        f"path {root}",
        "checksum",
        "kernel",
        "link",
    }
    if overlap in ("backward", "both"):
        assert "updates that began under backward" in {stall.cause for stall in stats.stalls}
    waited_s = sum(s.duration_s for s in stats.stalls if s.waits_for != "kernel")
    assert waited_s == pytest.approx(stats.io_wait_s, abs=1e-3)


class TestFailure:
    """An update fails in the middle of a forward."""

    @pytest.fixture(params=[("storage", "storage"), ("host", "storage")], ids="-".join)
    def failing(self, request, tmp_path, monkeypatch):
        with open_session(tmp_path, request.param) as session:
            model, optimizer = one_step(session)
            session.save("first")
            optimizer.zero_grad()
            loss_of(model, 1).backward()
            write = session._store.write

            def fail(record, *args, **kwargs):
                if record.startswith("state/blocks.1"):
                    raise StorageError("cannot write: no space")
                return write(record, *args, **kwargs)

            session._wrapped._memory.window.drop_cached()  # written from here on
            monkeypatch.setattr(session._wrapped._updates, "kept", lambda step: set())
            monkeypatch.setattr(session._store, "write", fail)
            optimizer.step()
            optimizer.zero_grad()
            yield session, model, optimizer
            monkeypatch.undo()

    def test_is_raised_by_the_forward(self, failing):
        _, model, _ = failing

        with pytest.raises(StorageError, match="no space"):
            loss_of(model, 2)

    def test_is_raised_by_every_forward_that_follows(self, failing):
        _, model, _ = failing
        with pytest.raises(StorageError, match="no space"):
            loss_of(model, 2)

        for _ in range(8):  # more than there are slots
            with pytest.raises(StoreError, match=r"cannot use a parameter.*no space.*load"):
                loss_of(model, 2)

    def test_is_raised_by_a_commit_and_no_other_is_accepted(self, failing):
        session, _, optimizer = failing

        with pytest.raises((StorageError, StoreError), match="no space"):
            session.commit()
        with pytest.raises(StoreError, match=r"cannot commit.*no space.*resume"):
            session.commit()
        with pytest.raises(StoreError, match="cannot update"):
            optimizer.step()

    def test_is_forgotten_with_the_state_by_going_back(self, failing, monkeypatch):
        session, model, optimizer = failing
        with pytest.raises(StorageError):
            loss_of(model, 2)
        monkeypatch.undo()

        session.load("first")

        reference = reference_after_one_step()
        reference.model.zero_grad()
        use_small_records(monkeypatch)
        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=2, first=1)
        require_equal_state(session, model, reference)


@pytest.mark.unified
def test_a_wait_of_autograd_s_thread_is_counted(tmp_path, monkeypatch):
    # Of a device with memory of its own backward runs in another thread.
    begun = threading.Event()
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        loss_of(model, 0).backward()
        deferred = session._wrapped._updates.deferred
        carry_out, hurry = deferred._pipeline.carry_out, deferred._hurry
        monkeypatch.setattr(
            deferred._pipeline, "carry_out", lambda job: begun.wait() and carry_out(job)
        )
        monkeypatch.setattr(deferred, "_hurry", lambda: (hurry(), begun.set()))
        optimizer.step()

        thread = threading.Thread(target=deferred.finish)
        thread.start()
        thread.join()

        assert deferred.waits.wait_s > 0
