"""Units as the user says, several models in one session, and what else a unit may hold."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn
from torch.nn import functional

import offload


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


RULES = [
    {"classes": ["Attention", "Linear"]},
    {"modules": ["blocks.*.up", "blocks.*.down", "head"]},
    {"largest": "8KiB"},
    {"smallest": "1B"},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: next(iter(rules)))
def test_units_change_no_bit(tmp_path, rules):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, units=rules) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, micro_steps=2)

        require_equal_state(session, model, reference)
        names = {unit.name for unit in session._wrapped.layout.units}
        assert names != {"tokens", "blocks.0", "blocks.1", "blocks.2", "head"}


def test_units_of_one_model_are_given_when_it_is_wrapped(tmp_path):
    with open_session(tmp_path) as session:
        session.wrap(build(SmallGPT), units={"modules": ["blocks.1.up"]})

        assert "blocks.1.up" in {unit.name for unit in session._wrapped.layout.units}


def test_a_model_divided_into_smaller_units_fits_a_smaller_device(tmp_path):
    budget = 24 << 10  # two of its largest linear layers; a whole block has 28 KiB
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, device="emulated", device_memory=budget) as session:
        with pytest.raises(offload.PlanError, match=r"tiers.device.memory"):
            session.wrap(build(SmallGPT))

        session.wrap(model, units={"classes": ["Linear"]})
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)

        require_equal_state(session, model, reference)
        assert session.stats().device_peak_bytes <= budget


def distillation_loss(model, teacher, index):
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, 61, (2, 16), generator=generator)
    with torch.no_grad():
        expected = teacher(tokens).float().softmax(-1)
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), expected.flatten(0, 1))


@pytest.mark.parametrize("first", ["trained", "frozen"])
def test_a_trained_model_and_a_frozen_one_share_a_session(tmp_path, first):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    teacher, plain_teacher = (build(SmallGPT, seed=3, layers=2) for _ in range(2))
    with open_session(tmp_path) as session:
        steps = [
            lambda: session.wrap(model, host_memory="600KiB"),
            lambda: session.wrap(teacher, training=False, name="teacher"),
        ]
        for step in steps if first == "trained" else reversed(steps):
            step()
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for index in range(3):
            loss = distillation_loss(model, teacher, index)
            expected = distillation_loss(reference.model, plain_teacher, index)
            assert same_bits(loss, expected)
            loss.backward()
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()

        require_equal_state(session, model, reference)
        assert all(parameter.grad is None for parameter in teacher.parameters())
        for name, values in teacher.state_dict().items():
            assert same_bits(values, plain_teacher.state_dict()[name])
        assert session.stats().host_peak_bytes <= 1 << 20


def test_two_models_have_no_more_than_the_budget_together(tmp_path):
    with open_session(tmp_path, budget_bytes=400 << 10) as session:
        session.wrap(build(SmallGPT))

        with pytest.raises(offload.PlanError, match=r"tiers.host.memory"):
            session.wrap(build(SmallGPT, width=64), training=False, name="teacher")


def test_a_frozen_model_keeps_its_own_values_when_the_trained_one_resumes(tmp_path):
    teacher = build(SmallGPT, seed=3)
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT), host_memory="600KiB")
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        optimizer.step()
        session.commit()
        trained = {name: values.clone() for name, values in model.state_dict().items()}

    with open_session(tmp_path, resume=True) as session:
        session.wrap(teacher, training=False, name="teacher")
        model = session.wrap(build(SmallGPT, seed=9))

        for name, values in model.state_dict().items():
            assert same_bits(values, trained[name])
        for name, values in teacher.state_dict().items():
            assert same_bits(values, build(SmallGPT, seed=3).state_dict()[name])


def test_generation_with_a_frozen_model_larger_than_the_device(tmp_path):
    model, plain = build(SmallGPT), build(SmallGPT)
    with open_session(tmp_path, device="emulated", device_memory="28KiB") as session:
        session.wrap(model, training=False)

        def generate(which):
            tokens = torch.zeros(1, 1, dtype=torch.int64)
            with torch.inference_mode():
                for _ in range(6):
                    following = which(tokens)[:, -1:].argmax(-1)
                    tokens = torch.cat([tokens, following], dim=1)
            return tokens

        assert torch.equal(generate(model), generate(plain))
        assert session.stats().write_bytes > 0  # when it was wrapped, and no more
        before = session.stats().write_bytes
        generate(model)
        assert session.stats().write_bytes == before


class Kinds(nn.Module):
    """Lists and dicts of parameters, empty and scalar ones, mixed dtypes, strides, integers."""

    def __init__(self):
        super().__init__()
        self.mixes = nn.ParameterList([nn.Parameter(torch.randn(8) / 8) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(8) / 8, "b": torch.randn(8) / 8})
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.every_other = nn.Parameter(torch.randn(8, 16)[:, ::2])
        self.codes = nn.Parameter(
            torch.randint(-127, 127, (8, 8), dtype=torch.int8), requires_grad=False
        )
        self.code_scale = nn.Parameter(torch.rand(8) / 100, requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(8).bfloat16())

    def forward(self, x):
        for mix, layer in zip(self.mixes, [*self.layers, self.layers[0]], strict=True):
            x = layer(x) * (1 + mix)
        x = x + self.named["a"] * self.named["b"]
        x = x @ self.turned + x @ self.every_other
        x = x @ (self.codes.float() * self.code_scale[:, None]).t()
        return (x * self.narrow.float()).sum() * self.scale + self.empty.sum()


@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_every_kind_of_parameter_is_trained_or_left_alone(tmp_path, caplog, parameters):
    def loss(model, index):
        generator = torch.Generator().manual_seed(index)
        return model(torch.randn(4, 8, generator=generator))

    model, reference = (build(Kinds, dtype=None) for _ in range(2))
    for parameter in reference.parameters():  # the bits of contiguous ones are those to compare
        parameter.data = parameter.data.contiguous()
    reference = Reference(reference, **OPTIONS)
    with open_session(tmp_path, (parameters, "storage")) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        (message,) = [r.getMessage() for r in caplog.records if "contiguous" in r.msg]
        assert "with the same values: `turned`, `every_other`; kernels" in message

        train_both(model, optimizer, reference, steps=3, loss_of=loss)

        for name, values in model.state_dict().items():
            expected = reference.model.state_dict()[name]
            assert same_bits(values, expected.contiguous()), name
        assert model.codes.grad is None
