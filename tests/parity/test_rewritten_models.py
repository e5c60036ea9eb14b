"""What a program does to the modules of a model that is wrapped: it is named, or refused."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import PLACEMENTS, open_session
from parity.side_by_side import OPTIONS, train_both
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from offload.errors import ConfigError, StoreError


class Extended(SmallGPT):
    """Computes what it did before, whatever `extra` it gets."""

    def forward(self, tokens):
        x = super().forward(tokens)
        return x + 0 * self.extra(x) if hasattr(self, "extra") else x


def extend(model):
    model.extra = nn.Linear(61, 61, dtype=torch.bfloat16)
    model.blocks[1].register_parameter("gate", nn.Parameter(torch.ones(3)))


def named_additions(caplog):
    return [r.getMessage() for r in caplog.records if "got parameters after `wrap`" in r.msg]


@pytest.mark.parametrize("overlap", ["forward", "none"])
@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[-1]], ids="-".join)
def test_parameters_that_are_added_after_wrap_are_named_once_and_disturb_nothing(
    tmp_path, caplog, placement, overlap
):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, placement, overlap=overlap) as session:
        model = session.wrap(build(Extended))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        before = named_additions(caplog)
        extend(model)
        for index in range(1, 3):
            for each in (model, reference.model):
                loss_of(each, index).backward()
            for one in (optimizer, reference):
                one.step()
            for each in (model, reference.model):
                each.zero_grad()
        digest = session.state_digest()

    assert before == []
    (message,) = named_additions(caplog)
    for expected in ("`extra.weight`", "`extra.bias`", "`blocks.1.gate`", "(7.4 KiB)"):
        assert expected in message
    assert digest == reference.digest()


def test_a_module_in_the_place_of_another_is_named_with_its_parameters(tmp_path, caplog):
    with open_session(tmp_path) as session, torch.no_grad():
        model = session.wrap(build(SmallGPT), training=False)
        loss_of(model, 0)
        assert named_additions(caplog) == []

        model.head = nn.Linear(32, 61, bias=False, dtype=torch.bfloat16)
        model.activation = nn.ReLU()  # has no parameters
        loss_of(model, 0)
        loss_of(model, 0)

    (message,) = named_additions(caplog)
    assert "after `wrap`: `head.weight` (3.81 KiB)" in message


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_state_dict_whose_tensors_would_replace_parameters_is_refused(tmp_path, placement):
    reference = Reference(build(SmallGPT), **OPTIONS)
    values = {name: each + 1 for name, each in reference.model.state_dict().items()}
    reference.model.load_state_dict(values)
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        for module, part in ((model, ""), (model.blocks[1].up, "blocks.1.up.")):
            of_module = {n.removeprefix(part): v for n, v in values.items() if n.startswith(part)}
            with pytest.raises(StoreError, match="found `assign=True`.*leave `assign` out"):
                module.load_state_dict(of_module, assign=True)
        model.load_state_dict(values)

        train_both(model, optimizer, Reference(reference.model, **OPTIONS), steps=2)


def test_an_optimizer_of_the_session_refuses_parameters_that_were_added_after_wrap(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        extend(model)

        with pytest.raises(ConfigError, match="call `session.wrap"):
            session.AdamW(model.parameters())


@pytest.mark.parametrize("leaves", [True, False])
def test_removing_a_parametrization_of_a_wrapped_module_is_refused_with_what_to_do(
    tmp_path, leaves
):
    model = build(SmallGPT, dtype=torch.float32)
    # With a state of its own, so that either way of removing it is possible elsewhere.
    parametrizations.orthogonal(model.blocks[1].attention.out, use_trivialization=False)
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        session.wrap(model)

        with pytest.raises(StoreError, match="parametrization of `weight`.*before `wrap`"):
            parametrize.remove_parametrizations(
                model.blocks[1].attention.out, "weight", leave_parametrized=leaves
            )


class Abstract(type(nn.Module)):
    """As a metaclass of the user's."""


class Layer(nn.Linear, metaclass=Abstract):
    pass


def test_a_parametrized_module_with_a_metaclass_of_its_own_streams(tmp_path):
    def make():
        model = build(SmallGPT, dtype=torch.float32)
        torch.manual_seed(2)
        model.blocks[1].up = Layer(32, 128)
        parametrizations.weight_norm(model.blocks[1].up)
        return model

    reference = Reference(make(), **OPTIONS)
    with open_session(tmp_path, budget_bytes=2 << 20) as session:
        model = session.wrap(make())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2)

        with pytest.raises(StoreError, match="parametrization of `weight`"):
            parametrize.remove_parametrizations(model.blocks[1].up, "weight")
