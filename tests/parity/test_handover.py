"""Parameters that go from their update into a slot: fewer bytes, the same each step, same bits."""

import itertools
import time

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch.nn import functional

from offload.optim.pipeline import UpdatePipeline
from offload.plan.handover import handed_over, records_under_forward

STEPS = 4
SIZES = [  # elements of a record, and budgets that give 1, 2 and 3 slots
    (4096, (143_360, 203_360, 233_360)),  # records of one unit, most of them
    (16_384, (330_000, 360_000, 390_000)),  # of two neighbours
    (1_000_000, (638_976, 668_976, 698_976)),  # one of all five
]
CASES = [
    pytest.param(elements, slots, budget, id=f"{elements}-{slots}")
    for elements, budgets in SIZES
    for slots, budget in enumerate(budgets, start=1)
]


def use_records(monkeypatch, elements):
    monkeypatch.setattr("offload.plan.record_size.SIZES", (elements,))


def freeze_block(model):
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def reads_by_step(path, *, between=lambda session, model: None, prepare=lambda m: m, **options):
    """Returns what each step from the second on read, and the wrapped model."""
    with open_session(path, **options) as session:
        model = session.wrap(prepare(build(SmallGPT)))
        optimizer = session.AdamW((p for p in model.parameters() if p.requires_grad), **OPTIONS)
        counts = []
        for step in range(STEPS + 1):
            loss_of(model, step).backward()
            counts.append(session.stats().moved_by_steps.read_bytes)
            optimizer.step()
            optimizer.zero_grad()
            between(session, model)
        found = [after - before for before, after in itertools.pairwise(counts)]
        return found[1:], session._wrapped, session.stats()


def handed_over_bytes(wrapped, **options):
    layout, slots = wrapped.layout, wrapped.plan.num_slots
    records = records_under_forward(layout, "resident", "forward", 0)
    names = handed_over(layout, slots, records=records, **options)
    subgroups = [subgroup for record in layout.records for subgroup in record.subgroups]
    return sum(s.padded_parameter_bytes for s in subgroups if s.name in names)


@pytest.mark.unified
@pytest.mark.parametrize("elements, slots, budget_bytes", CASES)
def test_a_step_reads_less_by_what_is_handed_over(
    tmp_path, monkeypatch, elements, slots, budget_bytes
):
    use_records(monkeypatch, elements)

    plain, *_ = reads_by_step(tmp_path / "none", overlap="none", budget_bytes=budget_bytes)
    handed, wrapped, stats = reads_by_step(tmp_path / "forward", budget_bytes=budget_bytes)

    assert wrapped.plan.num_slots == slots
    assert len(set(plain)) == len(set(handed)) == 1
    assert plain[0] - handed[0] == handed_over_bytes(wrapped) > 0
    if elements == 4096 and slots > 1:  # all units
        assert stats.updated_in_place == STEPS * 5


@pytest.mark.unified
@pytest.mark.parametrize("slow", ["updates", "passes"])
def test_the_bytes_do_not_depend_on_who_is_faster(tmp_path, monkeypatch, slow):
    use_records(monkeypatch, 16_384)
    options = {"budget_bytes": 390_000}
    expected, *_ = reads_by_step(tmp_path / "as-it-is", **options)

    owner, name = (UpdatePipeline, "compute") if slow == "updates" else (functional, "gelu")
    plain = getattr(owner, name)

    def delayed(*args):
        time.sleep(0.01)  # orders nothing: either way the result has to be the same
        return plain(*args)

    monkeypatch.setattr(owner, name, delayed)
    found, *_ = reads_by_step(tmp_path / "delayed", **options)

    assert found == expected


@pytest.mark.unified
def test_frozen_parameters_of_a_unit_are_read_and_the_others_handed_over(tmp_path, monkeypatch):
    use_records(monkeypatch, 4096)
    options = {"budget_bytes": 233_360, "prepare": freeze_block}

    plain, *_ = reads_by_step(tmp_path / "none", overlap="none", **options)
    handed, wrapped, stats = reads_by_step(tmp_path / "forward", **options)

    assert plain[0] - handed[0] == handed_over_bytes(wrapped)
    assert stats.updated_in_place == STEPS * 4


@pytest.mark.unified
def test_after_a_commit_only_units_that_had_slots_are_not_read(tmp_path, monkeypatch):
    use_records(monkeypatch, 4096)
    options = {"budget_bytes": 233_360}

    plain, *_ = reads_by_step(tmp_path / "none", overlap="none", **options)
    handed, wrapped, _ = reads_by_step(
        tmp_path / "forward", between=lambda session, model: session.commit(), **options
    )

    assert set(handed) == {plain[0] - handed_over_bytes(wrapped, is_finished_at_once=True)}


@pytest.mark.parametrize("elements, slots, budget_bytes", CASES[1::3])
def test_what_is_handed_over_is_what_the_reference_has(
    tmp_path, monkeypatch, elements, slots, budget_bytes
):
    use_records(monkeypatch, elements)
    with open_session(tmp_path, budget_bytes=2 * budget_bytes) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, micro_steps=2)
        model.eval()
        with torch.no_grad():  # takes what was to be handed over to the next forward
            loss_of(model, 50)
        model.train()
        train_both(model, optimizer, reference, steps=2, first=3)

        assert session.stats().updated_in_place > 0
        require_equal_state(session, model, reference)


@pytest.mark.unified
def test_backward_prefetches_no_further_for_units_that_came_from_an_update(tmp_path, monkeypatch):
    use_records(monkeypatch, 4096)
    with open_session(tmp_path, budget_bytes=640_000, prefetch=0) as session:  # two slots
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        counters = session._wrapped.residency.counters
        for step in range(3):
            loss = loss_of(model, step)
            before = counters.prefetches
            loss.backward()
            assert counters.prefetches == before
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.unified
@pytest.mark.parametrize(
    "every_step",
    [{}, {"train__eval_every": 1}, {"checkpoint__save_every": 1}],
    ids=["steps alone", "validation", "checkpoints"],
)
def test_a_plan_knows_what_of_a_step_is_read_when_something_follows_each(
    tmp_path, small_config, train, every_step
):
    settings = {"train__eval_every": 0, "train__max_grad_norm": 0.0} | every_step
    config = small_config(
        model__layers=8, model__width=128, model__heads=2, train__steps=5,
        tiers__host__memory="6MiB", tiers__storage__commit_every=0, policy="laptop", **settings,
    )  # fmt: skip

    found = train(config, run_dir=tmp_path / "run")

    assert found.read_bytes_per_step == pytest.approx(found.formula_read_bytes_per_step, rel=0.01)
