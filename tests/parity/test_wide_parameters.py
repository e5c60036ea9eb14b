"""Weights that no slot holds: computed in pieces, near the plain model, within the budget."""

import copy
import itertools

import pytest
import torch
from parity import sessions
from parity.oracle import same_bits
from parity.wide import (
    KIB,
    OPTIONS,
    TOLERANCE,
    VOCABULARY,
    WIDTH,
    Wide,
    build,
    in_order,
    loss_of,
    open_wide,
    require_gradients_within_bf16,
    require_near,
    tokens_of,
    train_near,
    use_small_slots,
)
from torch import nn
from torch.nn import functional

import offload


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    use_small_slots(monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 3},
        {"tie": "identity"},
        pytest.param({"bias": False, "sparse": True}, marks=pytest.mark.slow),
        pytest.param({"checkpoints": True}, marks=pytest.mark.slow),
        pytest.param({"scale_grad_by_freq": True}, marks=pytest.mark.slow),
    ],
    ids=lambda options: next(iter(options)),
)
def test_wide_weights_train_as_the_plain_model_within_a_budget_that_holds_none(
    tmp_path, options, caplog
):
    model = build(**options)
    reference = build(**{**options, "sparse": False})
    num_weights = 1 if "tie" in options else 2
    with open_wide(tmp_path, num_weights=num_weights) as session:
        session.wrap(model)

        with in_order(session):
            train_near(session, model, reference)

        require_near(model, reference)
        stats = session.stats()
        assert stats.host_peak_bytes <= session.config.tiers.host.memory
        if sessions.DEVICE != "cpu":
            assert stats.device_peak_bytes <= 200 * KIB
    assert caplog.text.count("computed in pieces") == num_weights


class ManyHeads(Wide):
    """Four wide weights, whose gradients together are 1,040 KiB."""

    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(2))

    def forward(self, tokens):
        outputs = super().forward(tokens)
        x = torch.tanh(self.tokens(tokens))
        return sum((head(x) for head in self.more), outputs)


def test_gradients_of_wide_weights_are_spilled_where_the_budget_holds_not_all(tmp_path):
    torch.manual_seed(5)
    model = ManyHeads()
    reference = copy.deepcopy(model)
    with open_wide(tmp_path, budget_bytes=960 * KIB) as session:
        session.wrap(model)

        with in_order(session):
            train_near(session, model, reference)

        require_near(model, reference)
        assert session.stats().host_peak_bytes <= 960 * KIB


def test_updates_under_a_forward_are_read_by_its_tiles(tmp_path):
    _train_under(tmp_path, "forward")


def test_updates_under_a_backward_are_read_by_the_next_pass(tmp_path):
    _train_under(tmp_path, "backward")


def _train_under(tmp_path, overlap):
    model, reference = build(), build()
    with open_wide(tmp_path, overlap=overlap) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        plain = torch.optim.AdamW(reference.parameters(), **OPTIONS)
        for step in range(3):
            for each in model, reference:
                loss_of(each, step).backward()
            for each in optimizer, plain:
                each.step()
                each.zero_grad()

        require_near(model, reference)


def test_tiles_in_bf16_are_rounded_once(tmp_path):
    model, reference = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16)
    with open_wide(tmp_path) as session:
        session.wrap(model)

        for each in model, reference:
            loss_of(each, 0).backward()

        require_gradients_within_bf16(model, reference)


@pytest.mark.parametrize("indices", [[], [7], [0, 0, 2049, 7, 7], range(VOCABULARY)])
def test_a_lookup_brings_the_bits_of_any_rows(tmp_path, indices):
    model, reference = build(), build()
    tokens = torch.tensor(list(indices), dtype=torch.int64)
    with open_wide(tmp_path) as session:
        session.wrap(model)

        found, expected = model.tokens(tokens), reference.tokens(tokens)
        found.square().sum().backward()
        expected.square().sum().backward()

        assert same_bits(found, expected)
        assert same_bits(model.tokens.weight.grad.clone(), reference.tokens.weight.grad)


@pytest.mark.parametrize("index", [-1, VOCABULARY])
def test_an_index_out_of_range_raises_as_in_torch(tmp_path, index):
    model = build()
    with open_wide(tmp_path) as session:
        session.wrap(model)

        with pytest.raises(IndexError, match="index out of range"):
            model.tokens(torch.tensor([1, index]))


@pytest.mark.unified
def test_bytes_read_follow_the_rows_in_use(tmp_path):
    model = build()
    with open_wide(tmp_path, budget_bytes=760 * KIB) as session:
        session.wrap(model)
        read = []
        for rows in [[0], [0, 1, 2], [0, 600, 1200]]:
            before = session.stats().read_bytes
            model.tokens(torch.tensor(rows))
            read.append(session.stats().read_bytes - before)

    assert read[0] == read[1] <= 16 * KIB, "of one subgroup"
    assert read[2] == 3 * read[0]


def test_a_store_goes_on_with_the_pieces_that_it_began_with(tmp_path):
    model = build()
    with open_wide(tmp_path) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        optimizer.step()
        session.commit()
        digest = session.state_digest()

    with open_wide(tmp_path, budget_bytes=16 << 20, resume=True, device_memory=None) as session:
        session.wrap(build())
        assert session.state_digest() == digest


def test_evaluation_without_gradients_is_near(tmp_path):
    model, reference = build().eval(), build().eval()
    budget = {"budget_bytes": 220 * KIB} if sessions.DEVICE == "cpu" else {}
    with open_wide(tmp_path, **budget) as session:
        session.wrap(model, training=False)

        with torch.no_grad():
            found, expected = model(tokens_of(0)), reference(tokens_of(0))

        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert found.argmax(-1).equal(expected.argmax(-1))


def test_autocast_computes_tiles_in_its_dtype(tmp_path):
    model, reference = build(), build()
    with open_wide(tmp_path) as session:
        session.wrap(model)
        for each in model, reference:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = each(tokens_of(0))
            assert output.dtype == torch.bfloat16
            output.float().square().mean().backward()

        require_gradients_within_bf16(model, reference)


def test_gradients_of_inputs_alone_leave_the_weight_without_one(tmp_path):
    model, reference = build(), build()
    with open_wide(tmp_path) as session:
        session.wrap(model)
        found, expected = (
            torch.autograd.grad(each.head(x).square().sum(), x)[0]
            for each in (model, reference)
            for x in [torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()]
        )

        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert model.head.weight.grad is None


def test_what_needs_the_whole_weight_in_a_pass_is_refused(tmp_path):
    model = build()
    x = torch.ones(3, WIDTH)
    with open_wide(tmp_path) as session:
        session.wrap(model)
        with pytest.raises(offload.StoreError, match=r"autograd\.grad"):
            torch.autograd.grad(model.head(x).sum(), dict.get(model.head._parameters, "weight"))
        handle = next(p for n, p in model.named_parameters() if n == "head.weight").register_hook(
            lambda gradient: gradient
        )
        with pytest.raises(offload.StoreError, match="no hook"):
            model.head(x).sum().backward()
        handle.remove()


def test_a_weight_that_a_function_uses_is_refused_with_what_to_do(tmp_path):
    model = build(tie="functional")
    with open_wide(tmp_path, num_weights=1) as session:
        session.wrap(model)

        with pytest.raises(offload.BudgetError, match=r"exceeds its slot.*memory"):
            model(tokens_of(0))


def test_what_cannot_be_computed_in_pieces_is_refused_as_before(tmp_path):
    with open_wide(tmp_path) as session, pytest.raises(offload.PlanError):
        session.wrap(build(max_norm=1.0))


def test_an_error_in_the_middle_of_the_tiles_leaves_every_slot_free(tmp_path, monkeypatch):
    model, reference = build(), build()
    with open_wide(tmp_path) as session:
        session.wrap(model)
        with monkeypatch.context() as patch:
            patch.setattr(functional, "linear", _fail_at(2, functional.linear))
            with pytest.raises(RuntimeError, match="in the middle"):
                model.head(torch.ones(3, WIDTH))

        for _ in range(5):
            found = model(tokens_of(0))

        torch.testing.assert_close(found, reference(tokens_of(0)), **TOLERANCE)


def _fail_at(call, function):
    calls = itertools.count(1)

    def run(*args):
        if next(calls) == call:
            raise RuntimeError("in the middle of the tiles")
        return function(*args)

    return run


def test_an_update_between_forward_and_backward_raises_as_in_torch(tmp_path):
    model = build()
    with open_wide(tmp_path) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        loss = loss_of(model, 1)
        optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()
