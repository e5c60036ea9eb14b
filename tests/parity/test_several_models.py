"""Several models in one session share its budget, its store and its commits."""

import itertools
import re

import pytest
import torch
from parity.models import SmallGPT, batch, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch.nn import functional

import offload
from offload.streaming.prefetch_distance import PrefetchDistance

BUDGET = 1 << 20
SOME = [pytest.param(p, marks=[pytest.mark.slow] if p[0] != p[1] else []) for p in PLACEMENTS]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def teacher():
    return build(SmallGPT, seed=7, layers=2)


def distillation_loss(teacher):
    """Returns a loss of a model that compares it with `teacher`, frozen."""

    def loss_of_student(model, index):
        inputs, _ = batch(index)
        with torch.no_grad():
            wanted = teacher(inputs).float().softmax(-1)
        return functional.cross_entropy(
            model(inputs).float().transpose(1, 2), wanted.transpose(1, 2)
        )

    return loss_of_student


def train_with_teachers(session, model, frozen, optimizer, reference, *, steps, first=0):
    plain = teacher()
    losses = {id(model): distillation_loss(frozen), id(reference.model): distillation_loss(plain)}
    train_both(
        model,
        optimizer,
        reference,
        steps=steps,
        first=first,
        loss_of=lambda m, index: losses[id(m)](m, index),
    )
    require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", SOME, ids="-".join)
def test_a_trained_model_and_a_frozen_one_share_a_budget(tmp_path, placement):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, placement, budget_bytes=BUDGET) as session:
        frozen = session.wrap(teacher(), training=False, name="teacher", host_memory=200_000)
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_with_teachers(session, model, frozen, optimizer, reference, steps=4)

        assert all(map(same_bits, frozen.state_dict().values(), teacher().state_dict().values()))
        planned = sum(m.plan.planned_bytes for m in session._models.all())
        assert session.stats().host_peak_bytes <= planned <= BUDGET
        each = [m.host_peak_bytes for m in session._models.all()]
        # What prefetches hold of one while the other is at its peak depends on their speed.
        assert max(each) <= session.stats().host_peak_bytes <= sum(each)


def test_waits_of_all_models_are_in_the_account(tmp_path):
    slow = {"tiers": {"storage": {"rate_limit": "10MB"}}}
    with open_session(tmp_path, prefetch=0, overlap="none", config=slow) as session:
        frozen = session.wrap(teacher(), training=False, name="teacher", host_memory=200_000)
        session.wrap(build(SmallGPT))
        inputs, _ = batch(0)

        frozen(inputs)  # the other model waits for nothing

        stats = session.stats()
    assert "fetching a unit" in {stall.cause for stall in stats.stalls}
    waited_s = sum(s.duration_s for s in stats.stalls if s.waits_for != "kernel")
    assert waited_s == pytest.approx(stats.io_wait_s, abs=1e-6)


@pytest.mark.parametrize("placement", SOME, ids="-".join)
def test_a_commit_and_a_resume_cover_both(tmp_path, placement):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, placement) as session:
        frozen = session.wrap(teacher(), training=False, name="teacher", host_memory=200_000)
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_with_teachers(session, model, frozen, optimizer, reference, steps=2)
        session.commit({"epoch": 1})
        digest = session.state_digest("teacher")

    with open_session(tmp_path, placement, resume=True) as session:
        # Other values: those of the store count.
        model = session.wrap(build(SmallGPT, seed=5), host_memory=700_000)
        other = build(SmallGPT, seed=6, layers=2)
        frozen = session.wrap(other, training=False, name="teacher")
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        assert session.metadata == {"epoch": 1}
        assert session.state_digest("teacher") == digest
        train_with_teachers(session, model, frozen, optimizer, reference, steps=2, first=2)


def test_a_model_that_is_not_wrapped_again_stays_in_the_commits(tmp_path):
    with open_session(tmp_path) as session:
        session.wrap(build(SmallGPT), host_memory=700_000)
        session.wrap(teacher(), training=False, name="teacher")
        session.commit()
        digest = session.state_digest("teacher")
    with open_session(tmp_path, resume=True) as session:
        session.wrap(build(SmallGPT))
        session.commit()

    with open_session(tmp_path, resume=True) as session:
        session.wrap(build(SmallGPT), host_memory=700_000)
        session.wrap(build(SmallGPT, layers=2), training=False, name="teacher")

        assert session.state_digest("teacher") == digest


def test_two_trained_models_have_an_optimizer_each(tmp_path):
    references = [Reference(build(SmallGPT), **OPTIONS), Reference(teacher(), **OPTIONS)]
    with open_session(tmp_path) as session:
        models = [
            session.wrap(build(SmallGPT), host_memory=700_000),
            session.wrap(teacher(), name="critic"),
        ]
        optimizers = [session.AdamW(models[0].parameters(), **OPTIONS)]
        groups = [{"params": models[1].parameters(), "lr": OPTIONS["lr"]}]
        optimizers.append(session.AdamW(groups, **OPTIONS))

        for step in range(3):
            for each in zip(models, optimizers, references, strict=True):
                train_both(*each, steps=1, first=step)

        require_equal_state(session, models[0], references[0])
        assert session.state_digest("critic") == references[1].digest()


def test_a_checkpoint_takes_every_model_back(tmp_path):
    with open_session(tmp_path) as session:
        models = [
            session.wrap(build(SmallGPT), host_memory=700_000),
            session.wrap(teacher(), name="critic"),
        ]
        optimizers = [session.AdamW(m.parameters(), **OPTIONS) for m in models]
        before = [session.state_digest(), session.state_digest("critic")]
        session.save("start")
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, 0).backward()
            optimizer.step()
        assert session.state_digest("critic") != before[1]

        session.load("start")

        assert [session.state_digest(), session.state_digest("critic")] == before


def test_a_checkpoint_without_one_of_the_models_changes_nothing(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT), host_memory=700_000)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        session.save("alone")
        session.wrap(teacher(), training=False, name="teacher")
        loss_of(model, 0).backward()
        optimizer.step()
        digest = session.state_digest()

        with pytest.raises(offload.StoreError, match="expected the state of model `teacher`"):
            session.load("alone")

        assert session.state_digest() == digest


def with_weight_of(layer):
    other = torch.nn.Linear(2, 2, bias=False)
    other.weight = layer.weight
    return other


@pytest.mark.parametrize("wrap, message", [
    (lambda s, first: s.wrap(teacher()), "without a name: the session has one"),
    (lambda s, first: s.wrap(teacher(), name="a/b"), "letters, digits"),
    (lambda s, first: s.wrap(with_weight_of(first.head), name="other"), "shares parameters"),
    (lambda s, first: s.wrap(teacher(), name="other", host_memory="1GiB"), "are left beside those"),
])  # fmt: skip
def test_a_further_model_needs_a_name_parameters_and_memory_of_its_own(tmp_path, wrap, message):
    with open_session(tmp_path) as session:
        first = session.wrap(build(SmallGPT))

        with pytest.raises(offload.OffloadError, match=message):
            wrap(session, first)


@pytest.mark.unified
@pytest.mark.parametrize("part", [None, 1 << 12])
def test_the_figure_of_the_session_is_named_where_what_is_left_does_not_suffice(tmp_path, part):
    with open_session(tmp_path, budget_bytes=300_000) as session:
        session.wrap(build(SmallGPT))

        with pytest.raises(offload.PlanError) as caught:
            session.wrap(teacher(), training=False, name="teacher", host_memory=part)

    message = str(caught.value)
    smallest_bytes = int(re.search(r"at least (\d+) bytes", message)[1])
    (mib,) = re.findall(r'`tiers.host.memory` to "(\d+)MiB"', message)
    (others_mib,) = re.findall(r"the session's other models to (\d+) MiB of it", message)
    assert int(mib) << 20 >= 270_000 + smallest_bytes
    assert ("give it more" in message) == (part is not None)
    with open_session(tmp_path / "b", budget_bytes=int(mib) << 20) as session:
        session.wrap(build(SmallGPT), host_memory=int(others_mib) << 20)
        session.wrap(teacher(), training=False, name="teacher")


def test_a_commit_needs_a_model_without_a_name(tmp_path):
    with open_session(tmp_path) as session:
        session.wrap(teacher(), training=False, name="teacher")

        with pytest.raises(offload.StoreError, match="expected one without a name"):
            session.commit()


def test_models_are_built_and_wrapped_one_after_the_other(tmp_path):
    with open_session(tmp_path, budget_bytes=400_000) as session:
        with session.building():
            frozen = build(SmallGPT, seed=7, layers=2)
        session.wrap(frozen, training=False, name="teacher", host_memory=100_000)
        with session.building():
            model = build(SmallGPT)
        session.wrap(model)

        assert same_bits(loss_of(frozen, 0), loss_of(teacher(), 0))
        assert same_bits(loss_of(model, 0), loss_of(build(SmallGPT), 0))


def test_two_models_from_one_building_are_wrapped_in_turn(tmp_path):
    with open_session(tmp_path, budget_bytes=400_000) as session:
        with session.building():
            frozen, model = build(SmallGPT, seed=7, layers=2), build(SmallGPT)
        session.wrap(frozen, training=False, name="teacher")
        session.wrap(model)

        assert same_bits(loss_of(frozen, 0), loss_of(teacher(), 0))
        assert same_bits(loss_of(model, 0), loss_of(build(SmallGPT), 0))


def generate(model, *, length):
    tokens = batch(0)[0][:, :3]
    with torch.inference_mode():
        for _ in range(length):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


def test_a_model_larger_than_its_budget_generates_and_keeps_no_state(tmp_path):
    plain = build(SmallGPT, layers=8)
    parameter_bytes = sum(2 * p.numel() for p in plain.parameters())
    with open_session(tmp_path, budget_bytes=parameter_bytes // 2) as session:
        model = session.wrap(build(SmallGPT, layers=8), training=False)

        generated = generate(model, length=5)
        with torch.no_grad():
            loss = loss_of(model, 0)

        assert torch.equal(generated, generate(plain, length=5))
        assert same_bits(loss, loss_of(plain, 0))
        stats = session.stats()
        assert stats.host_peak_bytes <= parameter_bytes // 2
        assert stats.prefetch_hits > 0
        assert (
            not session._wrapped.plan.gradients.fixed_bytes
            + session._wrapped.plan.resident_state_bytes
        )


@pytest.mark.parametrize("name", [None, "teacher"])
def test_a_session_counts_for_its_only_model_whatever_its_name(tmp_path, name):
    with open_session(tmp_path, ("storage", "storage"), budget_bytes=200_000) as session:
        model = teacher()
        parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        session.wrap(model, training=False, name=name)
        inputs, _ = batch(0)
        with torch.no_grad():
            model(inputs)

        stats = session.stats()

    assert stats.read_bytes >= parameter_bytes
    assert stats.moved_by_steps.read_bytes == stats.read_bytes
    assert stats.accesses >= 3
    assert stats.host_peak_bytes > 0
    assert stats.paths[0].read_bytes == stats.read_bytes


@pytest.mark.unified
def test_what_another_model_reads_ahead_is_no_part_of_a_step(tmp_path, monkeypatch):
    with open_session(tmp_path, ("storage", "storage"), overlap="none") as session:
        frozen = session.wrap(teacher(), training=False, name="teacher", host_memory=200_000)
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        ahead, moved = [], []
        for step, distance in enumerate([1, 1, 1, 0, 2, 1, 0]):
            # As where fetches come late or early by turns.
            monkeypatch.setattr(PrefetchDistance, "units", distance)
            distillation_loss(frozen)(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            ahead.append(session._models.get("teacher").counters.ahead_read_bytes)
            moved.append(session.stats().moved_by_steps.read_bytes)

    assert len(set(ahead[2:])) == 3
    assert len({after - before for before, after in itertools.pairwise(moved[2:])}) == 1


def test_a_digest_of_another_model_is_no_part_of_a_step_whose_updates_are_pending(tmp_path):
    with open_session(tmp_path) as session:
        frozen = session.wrap(teacher(), training=False, name="teacher", host_memory=200_000)
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for step in range(2):
            distillation_loss(frozen)(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = session.stats().moved_by_steps

        session.state_digest("teacher")

        assert session.stats().moved_by_steps == before
