"""Training through a session gives the bits of `oracle.Reference`: the matrix of tiers."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["plain", "clipped"])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_gradients_and_weights_equal_the_reference(tmp_path, placement, micro_steps, max_norm):
    reference = Reference(build(SmallGPT), **OPTIONS)

    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(
            model, optimizer, reference, steps=20, micro_steps=micro_steps, max_norm=max_norm
        )

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("codec", ["split", "fp32"])
def test_codecs_and_dtypes_equal_the_reference(tmp_path, placement, codec, dtype):
    reference = Reference(build(SmallGPT, dtype=dtype), **OPTIONS)

    with open_session(tmp_path, placement, codec=codec, budget_bytes=2 << 20) as session:
        model = session.wrap(build(SmallGPT, dtype=dtype))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, micro_steps=2, max_norm=0.05, steps=4)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_fp32_accumulation_equals_autograds_own(tmp_path, placement):
    plain = build(SmallGPT)
    for parameter in plain.parameters():
        parameter.grad_dtype = torch.float32
    reference = Reference(plain, **OPTIONS)

    with open_session(tmp_path, placement, gradient_dtype="float32") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, micro_steps=3, max_norm=0.05, steps=4)

        require_equal_state(session, model, reference)


def test_fp32_accumulation_adds_unrounded_sums(tmp_path):
    expected = {}
    plain = build(SmallGPT)
    for index in range(3):
        plain.zero_grad()
        loss_of(plain, index).backward()
        for name, parameter in plain.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float()

    with open_session(tmp_path, gradient_dtype="float32") as session:
        model = session.wrap(build(SmallGPT))
        for index in range(3):
            loss_of(model, index).backward()

        for name, parameter in model.named_parameters():
            assert same_bits(parameter.grad.clone(), expected[name]), name


def test_a_shard_of_several_full_records_equals_the_reference(tmp_path, monkeypatch):
    # More than 2**20 elements in one flat shard, so the records have the size of real runs.
    monkeypatch.undo()
    reference = Reference(build(SmallGPT, width=320, layers=1), **OPTIONS)

    with open_session(tmp_path, budget_bytes=40 << 20) as session:
        model = session.wrap(build(SmallGPT, width=320, layers=1))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, micro_steps=1, max_norm=0.5, steps=2)

        assert any(len(s) > 1 for s in session._wrapped.layout.subgroups.values())
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_mixed_dtypes_in_one_model_equal_the_reference(tmp_path, placement):
    def make():
        model = build(SmallGPT)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
        return model

    class Casting(nn.Module):
        """Norms in fp32 between layers in bf16."""

        def __init__(self):
            super().__init__()
            self.model = make()
            for module in self.model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                    module.register_forward_hook(lambda _, args, out: out.bfloat16())

        def forward(self, tokens):
            return self.model(tokens)

    reference = Reference(Casting(), **OPTIONS)

    with open_session(tmp_path, placement) as session:
        model = session.wrap(Casting())
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, micro_steps=1, max_norm=0.05, steps=4)

        require_equal_state(session, model, reference)


def test_every_placement_and_codec_gives_the_digest_of_the_reference_in_memory(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path / "memory", offload=False) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, micro_steps=1, max_norm=0.05, steps=3)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_lr_0_changes_nothing_and_lr_above_0_changes_every_parameter(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), lr=0.0)
        before = model.state_dict()
        before = {name: value.clone() for name, value in before.items()}

        loss_of(model, 0).backward()
        optimizer.step()
        unchanged = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        changed = model.state_dict()

        assert all(same_bits(before[name], unchanged[name]) for name in before)
        assert not any(same_bits(before[name], changed[name]) for name in before)
