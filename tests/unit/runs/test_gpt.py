import math

import pytest
import torch

from offload.errors import ConfigError
from offload.runs.gpt import GPT, GPTShape


def _small(**changes):
    sizes = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 64}
    return GPTShape(**{**sizes, **changes})


def test_parameters_are_named_and_ordered_as_they_are_built():
    with torch.device("meta"):
        model = GPT(_small(layers=1))

    block = [
        f"blocks.0.{module}.{kind}"
        for module in ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down")
        for kind in ("weight", "bias")
    ]
    assert [name for name, _ in model.named_parameters()] == [
        "tokens.weight",
        "positions.weight",
        *block,
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]


def test_the_quickstart_has_85_6_million_parameters():
    with torch.device("meta"):
        model = GPT(GPTShape(layers=12, width=768, heads=12, context=256, vocabulary=256))

    assert sum(p.numel() for p in model.parameters()) == 85_645_824
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_initial_values_are_drawn_twice_in_order_of_construction():
    torch.manual_seed(7)
    model = GPT(_small(layers=1))

    # The oracle builds torch's own modules in the order of the issue and draws again.
    torch.manual_seed(7)
    bf16 = torch.bfloat16
    modules = [
        torch.nn.Embedding(64, 32, dtype=bf16),
        torch.nn.Embedding(16, 32, dtype=bf16),
        torch.nn.Linear(32, 96, dtype=bf16),
        torch.nn.Linear(32, 32, dtype=bf16),
        torch.nn.Linear(32, 128, dtype=bf16),
        torch.nn.Linear(128, 32, dtype=bf16),
        torch.nn.Linear(32, 64, bias=False, dtype=bf16),
    ]
    residual = 0.02 / math.sqrt(2)
    with torch.no_grad():
        for module, std in zip(
            modules, (0.02, 0.02, 0.02, residual, 0.02, residual, 0.02), strict=True
        ):
            module.weight.normal_(0, std)
    found = [
        model.tokens,
        model.positions,
        model.blocks[0].attention.qkv,
        model.blocks[0].attention.out,
        model.blocks[0].mlp.up,
        model.blocks[0].mlp.down,
        model.head,
    ]
    for ours, oracle in zip(found, modules, strict=True):
        assert torch.equal(ours.weight, oracle.weight)
        if getattr(ours, "bias", None) is not None:
            assert not ours.bias.any()


def test_loss_is_the_mean_cross_entropy_of_fp32_logits():
    torch.manual_seed(0)
    model = GPT(_small())
    inputs, targets = torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))

    loss = model(inputs, targets)

    scores = torch.log_softmax(model.logits(inputs).float(), dim=-1)
    expected = -scores.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss, expected)
    assert loss.dtype == torch.float32


def test_a_position_does_not_see_later_tokens():
    torch.manual_seed(0)
    model = GPT(_small(dtype=torch.float32))
    tokens = torch.randint(0, 64, (1, 16))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 64

    before, after = model.logits(tokens), model.logits(changed)

    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"model\.heads"):
        _small(heads=5)
