"""Weights that no slot holds: computed in pieces, near the plain model, within the budget."""

import contextlib
import copy
import itertools

import cuda_without_gpu
import pytest
import torch
from parity import sessions
from parity.oracle import same_bits
from parity.sessions import open_session, use_small_records
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import offload
from offload.streaming import edit_watch

WIDTH = 32
VOCABULARY = 2_050
"""256 KiB of fp32 and a rest: four slots of 64 KiB, which the tests make the least."""
KIB = 1 << 10
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""Sums over tiles round otherwise; updates of AdamW with this `eps` do not magnify that."""
OPTIONS = {"lr": 1e-2, "eps": 1e-3}


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """Slots of 64 KiB, of which a tile has 32, and subgroups of 16: no row border is theirs."""
    use_small_records(monkeypatch)
    monkeypatch.setattr("offload.plan.tiles.EDGE_BYTES", 16 * KIB)
    for module in "plan.tiles", "streaming.wide":
        monkeypatch.setattr(f"offload.{module}.LEAST_SLOT_BYTES", 64 * KIB)


class Wide(nn.Module):
    def __init__(self, *, bias=True, tie=None, checkpoints=False, dtype=torch.float32, **options):
        super().__init__()
        rows = VOCABULARY * 4 // dtype.itemsize
        self.tokens = nn.Embedding(rows, WIDTH, dtype=dtype, **options)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, rows, bias=bias, dtype=dtype)
        self.checkpoints = checkpoints
        if tie == "identity":
            self.head.weight = self.tokens.weight
        if tie == "functional":
            self.head = None

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.head is None:
            return functional.linear(x, self.tokens.weight)
        return checkpoint(self.head, x, use_reentrant=False) if self.checkpoints else self.head(x)


def build(**options):
    torch.manual_seed(5)
    return Wide(**options)


def open_wide(tmp_path, *, overlap="none", num_weights=2, **options):
    """A session whose slots hold no wide weight, whichever device they are on."""
    budget = {"budget_bytes": 8 << 20, "device_memory": 200 * KIB}
    if sessions.DEVICE == "cpu":  # gradients, slots and records
        budget = {"budget_bytes": (num_weights * 270 + 220) * KIB}
    order = "sequential" if overlap == "none" else "resident"
    return open_session(tmp_path, order=order, overlap=overlap, **{**budget, **options})


def units_of(session):
    return session._wrapped.residency.units


def in_order(session):
    """On a device of its own memory: no tile is read before its copy has come."""
    return contextlib.nullcontext() if sessions.DEVICE == "cpu" else session._device.checking()


def tokens_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2, 5), generator=generator)


def loss_of(model, step):
    return (
        model(tokens_of(step)).float().square().mean() + model(tokens_of(step + 9)).float().mean()
    )


def require_near_gradients(model, reference):
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.clone(), expected[name].grad, **TOLERANCE)


def require_gradients_within_bf16(model, reference):
    """Within four units in the last place of the largest one."""
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        plain = expected[name].grad.float()
        difference = (parameter.grad.clone().float() - plain).abs().max()
        assert difference <= plain.abs().max() / 64, name


def train_near(session, model, reference, *, steps=2):
    optimizer = session.AdamW(model.parameters(), **OPTIONS)
    plain = torch.optim.AdamW(reference.parameters(), **OPTIONS)
    for step in range(steps):
        for _ in range(2):  # the second adds to the first
            for each in model, reference:
                loss_of(each, step).backward()
        if session.config.policy.overlap == "none":
            require_near_gradients(model, reference)
        for each in optimizer, plain:
            each.step()
            each.zero_grad()


def require_near(model, reference):
    expected = reference.state_dict()
    for name, values in model.state_dict().items():
        torch.testing.assert_close(values, expected[name], **TOLERANCE)


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


@pytest.mark.unified
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


def test_state_dict_load_copies_and_edits_bring_the_whole_weight(tmp_path):
    model, reference = build(), build()
    with open_wide(tmp_path) as session:
        session.wrap(model)
        twice = {name: 2 * values for name, values in reference.state_dict().items()}

        assert all(same_bits(v, reference.state_dict()[n]) for n, v in model.state_dict().items())
        assert same_bits(copy.deepcopy(model)(tokens_of(0)), reference(tokens_of(0)))
        model.load_state_dict(twice)
        assert all(same_bits(values, twice[n]) for n, values in model.state_dict().items())
        with torch.no_grad():
            model.head.weight.mul_(0.5)
            reference.load_state_dict({**twice, "head.weight": reference.head.weight.clone()})

        train_near(session, model, reference)
        require_near(model, reference)


@pytest.mark.unified
@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_a_look_on_another_device_is_there_and_leaves_the_weight_its_gradient(
    tmp_path, monkeypatch, parameters
):
    cuda = cuda_without_gpu.pretend(monkeypatch, tells=True)
    model, reference = build(), build()
    options = {"device": "cuda", "budget_bytes": 8 << 20, "device_memory": 200 * KIB}
    placement = {"placement": (parameters, "storage")}
    with cuda.watching(), open_wide(tmp_path, **placement, **options) as session:
        session.wrap(model)
        losses = [loss_of(each, 0) for each in (model, reference)]
        for name in "tokens", "head":
            weight = getattr(model, name).weight
            assert cuda.has(weight)  # or backward would compute with memory of two devices
            assert same_bits(weight, getattr(reference, name).weight)
        del weight
        losses += [loss_of(each, 1) for each in (model, reference)]
        for loss in losses:
            loss.backward()
        require_near_gradients(model, reference)
        with torch.no_grad():
            model.head.weight[7].fill_(0.5)
            reference.head.weight[7].fill_(0.5)

        require_near(model, reference)
    assert cuda.races == []


@pytest.mark.unified
@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_a_state_dict_takes_no_more_of_a_device_than_its_slots(tmp_path, monkeypatch, parameters):
    cuda = cuda_without_gpu.pretend(monkeypatch, tells=True)
    options = {"device": "cuda", "budget_bytes": 8 << 20, "device_memory": 200 * KIB}
    placement = {"placement": (parameters, "storage")}
    with cuda.watching(), open_wide(tmp_path, **placement, **options) as session:
        model = session.wrap(build())
        device = session._device
        monkeypatch.setattr(device, "empty", None)

        values, num_bytes = model.state_dict(), device.copied_out_bytes

        expected = build().state_dict()
        assert all(same_bits(values[name], expected[name]) for name in expected)
        assert not any(map(cuda.has, values.values()))
        assert num_bytes == sum(value.nbytes for value in expected.values())
    assert cuda.races == []


def test_loading_values_leaves_no_whole_weight_in_memory(tmp_path):
    values = {name: each + 1.0 for name, each in build().state_dict().items()}
    with open_wide(tmp_path) as session:
        model = session.wrap(build())

        model.load_state_dict(values)

        assert not any(unit.is_wide and unit.base is not None for unit in units_of(session))
        assert all(same_bits(each, values[name]) for name, each in model.state_dict().items())


@pytest.mark.unified
def test_a_look_for_which_a_device_has_no_memory_says_what_to_do(tmp_path, monkeypatch):
    with open_wide(tmp_path, device="emulated") as session:
        model = session.wrap(build())

        def refuse(num_bytes):
            raise torch.OutOfMemoryError(f"tried to allocate {num_bytes} bytes")

        monkeypatch.setattr(session._device, "empty", refuse)
        for _ in range(2):
            with pytest.raises(offload.BudgetError, match=r"at `head\.weight`.*`model\.state_dict"):
                _ = model.head.weight

        assert same_bits(model.state_dict()["head.weight"], build().head.weight)


@pytest.mark.unified
def test_a_whole_weight_on_a_device_is_hashed_and_not_summed(tmp_path, monkeypatch):
    summed = []
    monkeypatch.setattr(edit_watch, "_sum_into", lambda base, _: summed.append(len(base)))
    with open_wide(tmp_path, device="emulated") as session:
        model = session.wrap(build())
        for module in (model.head, *model.blocks):
            assert module.weight is not None
        slot_bytes = session._wrapped.residency.slot_bytes

    assert 0 < max(summed) <= slot_bytes


def test_a_whole_weight_whose_reading_failed_is_read_again(tmp_path, monkeypatch):
    with open_wide(tmp_path) as session:
        model = session.wrap(build())
        tier = session._wrapped.residency._tier

        def fail(*_, **__):
            raise offload.StorageError("cannot read: no such device")

        with monkeypatch.context() as patched:
            patched.setattr(tier, "start_read", fail)
            for _ in range(2):
                with pytest.raises(offload.StorageError, match="no such device"):
                    model.state_dict()

        assert same_bits(model.state_dict()["head.weight"], build().head.weight)


def test_a_write_to_an_absent_weight_is_found_by_a_state_dict(tmp_path):
    with open_wide(tmp_path) as session:
        model = session.wrap(build())
        weight = dict(model.named_parameters())["head.weight"]

        weight.data.zero_()

        with pytest.raises(offload.StoreError, match=r"cannot fetch parameter `head\.weight`"):
            model.state_dict()


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
