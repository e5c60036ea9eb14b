"""The optimizer as torch and its users see it."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.sessions import open_session
from torch import nn

from offload.errors import ConfigError, StoreError


@pytest.fixture
def session(tmp_path):
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        yield session


@pytest.fixture
def model(session):
    return session.wrap(build(SmallGPT))


def test_it_is_an_optimizer_of_torch_with_torchs_defaults(session, model):
    optimizer = session.AdamW(model.parameters())

    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, torch.optim.Optimizer)
    for name, value in optimizer.defaults.items():
        assert value == plain.defaults[name], name


@pytest.mark.parametrize("name, value", [
    ("lr", -1.0),
    ("lr", float("nan")),
    ("eps", -1e-8),
    ("betas", (1.0, 0.9)),
    ("betas", (0.9, -0.1)),
    ("weight_decay", -0.1),
])  # fmt: skip
def test_an_option_out_of_range_is_refused_with_its_name(session, model, name, value):
    with pytest.raises(ConfigError, match=f"`{name}"):
        session.AdamW(model.parameters(), **{name: value})


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "fused"])
def test_an_option_of_a_group_that_would_have_no_effect_is_refused(session, model, name):
    with pytest.raises(ConfigError, match=f"`{name}`"):
        session.AdamW([{"params": model.parameters(), name: True}])


def test_a_parameter_of_no_wrapped_model_is_refused_with_its_place(session, model):
    stranger = nn.Parameter(torch.zeros(3, 2))

    with pytest.raises(ConfigError, match=r"parameter 1 of param_group 0, shape \(3, 2\)"):
        session.AdamW([model.norm.weight, stranger])


def test_frozen_parameters_may_be_given_and_stay_as_they_are(session):
    model = build(SmallGPT)
    model.tokens.requires_grad_(False)
    before = model.tokens.weight.detach().clone()
    session.wrap(model)
    optimizer = session.AdamW(model.parameters())

    loss_of(model, 0).backward()
    optimizer.step()

    assert model.tokens.weight.equal(before)
    assert session.stats().completed_steps == 1


def test_a_gradient_for_a_parameter_that_was_frozen_when_wrapped_is_refused(session):
    model = build(SmallGPT)
    model.tokens.requires_grad_(False)
    session.wrap(model)
    optimizer = session.AdamW(model.parameters())
    model.tokens.requires_grad_(True)

    loss_of(model, 0).backward()

    with pytest.raises(ConfigError, match=r"tokens\.weight.*before `wrap`"):
        optimizer.step()


def test_an_optimizer_before_wrapping_is_refused(session):
    with pytest.raises(StoreError, match="no model is wrapped"):
        session.AdamW(build(SmallGPT).parameters())


def test_a_refused_group_leaves_the_optimizer_as_it_was(session, model):
    optimizer = session.AdamW([model.norm.weight])

    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer.add_param_group({"params": [model.norm.bias], "lr": 0.5})

    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_the_state_is_not_copied_out_or_in(session, model):
    optimizer = session.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()

    assert optimizer.state_dict()["state"] == {}
    with pytest.raises(StoreError, match="resume"):
        optimizer.load_state_dict({})


def test_named_parameters_are_taken(session, model):
    optimizer = session.AdamW(model.named_parameters())

    loss_of(model, 0).backward()
    optimizer.step()

    assert session.stats().completed_steps == 1
    assert optimizer.param_groups[0]["param_names"][0] == "tokens.weight"


def test_only_the_parameters_of_the_optimizer_are_updated(session, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = session.AdamW(model.norm.parameters(), lr=0.1)

    loss_of(model, 0).backward()
    optimizer.step()

    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"norm.weight", "norm.bias"}


def test_hooks_of_torch_around_step_run(session, model):
    optimizer = session.AdamW(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    loss_of(model, 0).backward()
    optimizer.step()

    assert seen == ["before", "after"]


def test_a_learning_rate_may_be_a_tensor(session, model):
    optimizer = session.AdamW(model.parameters(), lr=torch.tensor(0.1))

    loss_of(model, 0).backward()
    optimizer.step()

    assert session.stats().completed_steps == 1


@pytest.mark.parametrize("scheduler_of", [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
])  # fmt: skip
def test_schedulers_of_torch_drive_it(session, model, scheduler_of):
    optimizer = session.AdamW(model.parameters())
    scheduler = scheduler_of(optimizer)

    rates = []
    for index in range(3):
        loss_of(model, index).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    assert len(set(rates)) == 3
