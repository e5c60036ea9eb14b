"""Optimizers alone: for a module that nobody wrapped, the bits of a session or of all in memory."""

import gc

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import use_small_records

import offload

BUDGET_BYTES = 400 << 10
"""Parameters, gradients and some of the 14 records of 40 KiB."""
OPTIMIZERS = {
    "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.5},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def build_small():
    return build(SmallGPT, dtype=torch.bfloat16)


def make(tmp_path, model, name="AdamW", **options):
    make_it = getattr(offload, name)
    options = {"host_memory": BUDGET_BYTES, "store": tmp_path / "store", **options}
    return make_it(model.named_parameters(), **options)


def train(model, optimizer, steps):
    for index in steps:
        loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_losses_norms_weights_and_state_equal_those_of_training_in_memory(tmp_path):
    reference = Reference(build_small())
    model = build_small()

    with make(tmp_path, model) as optimizer:
        for index in range(4):
            plain, loss = loss_of(reference.model, index), loss_of(model, index)
            plain.backward()
            loss.backward()
            expected = reference.clip(0.1)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            reference.step()
            optimizer.step()
            reference.model.zero_grad()
            optimizer.zero_grad()

            assert same_bits(loss, plain)
            assert float(norm) == float(expected)
            for name, parameter in model.named_parameters():
                assert same_bits(parameter, reference.parameters[name])
        stats = optimizer.session.stats()

        assert optimizer.state_digest() == reference.digest()
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert stats.read_bytes > 0
        assert 0 < stats.host_peak_bytes <= BUDGET_BYTES


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.items(), ids=OPTIMIZERS)
def test_every_optimizer_gives_the_state_of_a_session(tmp_path, name, options):
    with offload.Session(offload=False) as session:
        wrapped = session.wrap(build_small())
        train(wrapped, getattr(session, name)(wrapped.parameters(), **options), range(2))
        expected = session.state_digest()

    model = build_small()
    with make(tmp_path, model, name, **options) as optimizer:
        train(model, optimizer, range(2))

        assert optimizer.state_digest() == expected


def test_a_commit_is_resumed_with_the_same_bits_and_what_came_after_is_dropped(tmp_path):
    reference = Reference(build_small())
    for index in (0, 1, 2, 3):
        loss_of(reference.model, index).backward()
        reference.step()
        reference.model.zero_grad()
    model = build_small()
    with make(tmp_path, model) as optimizer:
        train(model, optimizer, (0, 1))
        optimizer.commit(metadata={"step": 2})
        train(model, optimizer, (9,))

    another = build_small()
    with torch.no_grad():
        another.head.weight.zero_()  # whatever it was built with, the store's values count
    with make(tmp_path, another, resume=True) as optimizer:
        assert optimizer.metadata == {"step": 2}
        train(another, optimizer, (2, 3))

        assert optimizer.state_digest() == reference.digest()


def test_param_groups_schedulers_closures_and_edits_have_their_plain_effect(tmp_path):
    reference, model = Reference(build_small(), weight_decay=0.0), build_small()
    plain, given = reference.parameters, dict(model.named_parameters())
    norms = [name for name in given if "norm" in name]
    groups = [
        {"params": [(n, p) for n, p in given.items() if n not in norms]},
        {"params": ((n, given[n]) for n in norms), "lr": 0.5},
    ]

    with offload.AdamW(
        groups, host_memory=BUDGET_BYTES, paths=[tmp_path], weight_decay=0.0
    ) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for index in range(3):
            lr = 1e-3 * 0.5**index
            reference.lr_of = {n: 0.5 * 0.5**index if n in norms else lr for n in given}
            loss_of(reference.model, index).backward()
            reference.step()
            reference.model.zero_grad()

            optimizer.step(lambda index=index: loss_of(model, index).backward())
            optimizer.zero_grad()
            schedule.step()

            with torch.no_grad():
                given["head.weight"].mul_(0.5)
                plain["head.weight"].mul_(0.5)
            reference.edited("head.weight")

        assert optimizer.state_digest() == reference.digest()


def test_after_close_parameters_are_plain_and_keep_their_values(tmp_path):
    model = build_small()
    optimizer = make(tmp_path, model)
    train(model, optimizer, (0,))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    optimizer.close()
    optimizer.close()
    del optimizer
    gc.collect()

    assert all(same_bits(p, before[name]) for name, p in model.named_parameters())
    loss_of(model, 1).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_parameters_without_names_are_kept_by_position(tmp_path):
    weights = [torch.nn.Parameter(torch.ones(n)) for n in (3, 0, 5)]
    with offload.SGD(weights, lr=1.0, host_memory="1MiB", store=tmp_path / "s") as optimizer:
        weights[0].sum().backward()
        optimizer.step()
        optimizer.commit()
    again = [torch.nn.Parameter(torch.ones(n)) for n in (3, 0, 5)]

    with offload.SGD(
        [{"params": again}], lr=1.0, host_memory="1MiB", store=tmp_path / "s", resume="auto"
    ):
        assert [p.tolist() for p in again] == [[0.0] * 3, [], [1.0] * 5]


def _streamed(tmp_path):
    session = offload.Session(host_memory="1MiB", store=tmp_path / "of-a-session")
    session.open()
    model = session.wrap(build_small())
    try:
        return [torch.nn.Parameter(p.data) for p in model.parameters()]
    finally:
        session.close()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda _: torch.nn.Parameter(torch.ones(2)), "found one tensor"),
        (lambda _: [torch.ones(2)], "found `Tensor`"),
        (lambda _: [torch.nn.Parameter(torch.ones(2, device="meta"))], "found one on `meta`"),
        (_streamed, "without memory of its own"),
        (lambda _: [("a", torch.nn.Parameter(torch.ones(2)))] * 2, "two parameters `a`"),
    ],
    ids=["tensor", "no-parameter", "meta", "streamed", "same-name"],
)
def test_what_is_no_plain_parameter_is_refused(tmp_path, params, message):
    given = params(tmp_path)

    with pytest.raises(offload.ConfigError, match=message):
        offload.AdamW(given, host_memory="1MiB", store=tmp_path / "store")

    assert not (tmp_path / "store").exists()


def test_refusals_name_the_remedy_and_leave_nothing_open(tmp_path):
    model = build_small()

    with pytest.raises(offload.ConfigError, match="`paths` or `store`"):
        offload.AdamW(model.parameters(), host_memory="1MiB")
    with pytest.raises(offload.ConfigError, match="`lr`"):
        make(tmp_path, model, lr=-1.0)
    with pytest.raises(offload.PlanError, match="at least"):
        make(tmp_path, model, host_memory="4KiB")
    with make(tmp_path, model) as optimizer:
        optimizer.commit()
        with pytest.raises(offload.ConfigError, match="when it is made"):
            optimizer.add_param_group({"params": [("x", torch.nn.Parameter(torch.ones(2)))]})
        with pytest.raises(offload.StoreError, match="resume=True"):
            optimizer.load_state_dict({})
    with pytest.raises(offload.StoreError, match="resume"):
        make(tmp_path, model)
    with pytest.raises(offload.StoreError, match="cannot make an optimizer"):
        make(tmp_path, model, "Lion", resume=True)
